// Makes dist/: one CommonJS file, which both `require` and `import` load, so that an error's class is the same for
// both; modules for bundlers; and the declarations. Nothing of it is committed.
import { execFileSync } from "node:child_process";
import { copyFileSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const dist = join(here, "dist");
const types = join(dist, "types");
const require = createRequire(import.meta.url);

rmSync(dist, { recursive: true, force: true });
const options = {
  entryPoints: [join(here, "src/index.ts")],
  bundle: true,
  packages: "external",
  platform: "node",
  target: "node20.4",
  legalComments: "none",
  logLevel: "warning",
};
await build({ ...options, format: "cjs", outfile: join(dist, "index.cjs") });
const modules = { format: "esm", outdir: join(dist, "module"), splitting: true, outExtension: { ".js": ".mjs" } };
await build({ ...options, ...modules });
const tsc = require.resolve("typescript/bin/tsc");
execFileSync(process.execPath, [tsc, "-p", join(here, "tsconfig.build.json")], { stdio: "inherit" });
for (const name of readdirSync(types, { recursive: true })) {
  if (!name.endsWith(".d.ts")) continue;
  const path = join(types, name);
  // Compilers of users look for declarations by the names of what was compiled.
  writeFileSync(path, readFileSync(path, "utf8").replace(/(["'])(\.{1,2}\/[^"']+)\.ts\1/g, "$1$2.js$1"));
}
writeFileSync(join(types, "package.json"), '{ "type": "commonjs" }\n');
const names = Object.keys(require(join(dist, "index.cjs"))).sort();
// Not `import k8e from "./index.cjs"`: Node.js would look through all of it for names, which takes 55 ms.
writeFileSync(
  join(dist, "index.mjs"),
  'import { createRequire } from "node:module";\n' +
    `export const { ${names.join(", ")} } = createRequire(import.meta.url)("./index.cjs");\n`,
);
writeFileSync(join(dist, "index.d.mts"), 'export * from "./types/index.js";\n');
writeFileSync(join(dist, "index.d.cts"), 'export * from "./types/index.js";\n');
copyFileSync(join(here, "..", "..", "LICENSE"), join(here, "LICENSE"));
