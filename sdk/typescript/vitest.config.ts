import { defineConfig } from "vitest/config";

export default defineConfig({
  test: {
    include: ["tests/**/*.test.ts"],
    testTimeout: 120_000,
    hookTimeout: 120_000,
    // One worker: what is tested is a gateway, and it and its sandboxes have the machine's other processors.
    pool: "forks",
    maxWorkers: 1,
    isolate: false,
    fileParallelism: false,
  },
});
