import tseslint from "typescript-eslint";

export default tseslint.config(
  { ignores: ["dist/", "docs/", "node_modules/", "src/generated/sandbox_pb.ts"] },
  tseslint.configs.strictTypeChecked,
  tseslint.configs.stylisticTypeChecked,
  {
    languageOptions: {
      parserOptions: { projectService: { allowDefaultProject: ["eslint.config.js", "build.mjs"] }, tsconfigRootDir: import.meta.dirname },
    },
    rules: {
      eqeqeq: "error",
      complexity: ["error", 20],
      "max-lines": ["error", { max: 700, skipComments: true }],
      "@typescript-eslint/explicit-function-return-type": ["error", { allowExpressions: true }],
      "@typescript-eslint/no-explicit-any": "error",
      "@typescript-eslint/prefer-nullish-coalescing": "off", // an empty text or 0 means that nothing was said
      "@typescript-eslint/restrict-template-expressions": ["error", { allowNumber: true }],
      "@typescript-eslint/no-unnecessary-condition": ["error", { allowConstantLoopConditions: true }],
      // What is aborted rejects with the caller's own reason, whatever it is.
      "@typescript-eslint/only-throw-error": "off",
      "@typescript-eslint/prefer-promise-reject-errors": "off",
    },
  },
  { files: ["**/*.js", "**/*.mjs"], extends: [tseslint.configs.disableTypeChecked] },
  {
    files: ["tests/**", "examples/**", "bench/**"],
    rules: { "@typescript-eslint/no-non-null-assertion": "off", "@typescript-eslint/explicit-function-return-type": "off" },
  },
);
