/**
 * Packages that are installed in a sandbox.
 *
 * @module
 */

import { InvalidRequest } from "./errors.ts";

const MAX_PACKAGES = 200;

/** How Python packages are installed. They are data: no shell sees them, and none is an option. */
export function pipCommand(packages: readonly string[]): string[] {
  if (!Array.isArray(packages) || packages.length === 0 || packages.length > MAX_PACKAGES) {
    throw new InvalidRequest(`packages must be a list of 1 to ${MAX_PACKAGES} requirements, like ["requests>=2.28"]`, {
      hint: 'write ["NAME"]',
    });
  }
  const names = packages as readonly string[];
  for (const name of names) {
    if (!name.trim() || name.trimStart().startsWith("-") || name.includes("\0") || name.length > 1000) {
      throw new InvalidRequest(`'${name.slice(0, 80)}' is not a package`, { hint: "a requirement looks like requests>=2.28" });
    }
  }
  return ["python3", "-m", "pip", "install", "--no-input", "--", ...names];
}
