/**
 * Installations of k8e on this machine, for a client that has to have a gateway started. A program of
 * another user is never run.
 *
 * @module
 */

import { existsSync, lstatSync, readFileSync, realpathSync, type Stats } from "node:fs";
import { homedir } from "node:os";
import { delimiter, dirname, join } from "node:path";

import { uid } from "./local.ts";

const SYSTEM_HOME = "/opt/k8e";
const MAX_SCRIPT = 8192;

/** A Python that has k8e. */
export interface Installation {
  readonly python: string;
  /** K8E_HOME for it, where that is not the one that it finds by itself. */
  readonly home: string;
}

/** The installations, the likeliest first, each once; and the unusable ones, with the reason. */
export function find(): { usable: Installation[]; refused: string[] } {
  const usable: Installation[] = [];
  const refused: string[] = [];
  const seen = new Set<string>();
  for (const python of pythons()) {
    const folder = dirname(python);
    if (seen.has(folder) || !exists(python)) continue;
    seen.add(folder);
    const problem = unsafe(python);
    if (problem) refused.push(`${python}: ${problem}`);
    else usable.push({ python, home: homeOf(python) });
  }
  return { usable, refused };
}

function ownHome(): string {
  return join(process.env.HOME || homedir(), ".local/share/k8e/home");
}

function pythons(): string[] {
  const homes = [process.env.K8E_HOME ?? "", uid() === 0 ? "" : ownHome(), SYSTEM_HOME];
  const installed = homes.filter((home) => home !== "").map((home) => join(home, "venv/bin/python"));
  return [...installed, ...onPath()];
}

/** The Pythons of commands `k8e` on PATH that are ours: K8E's own has that name too. */
function onPath(): string[] {
  const folders = (process.env.PATH ?? "").split(delimiter).filter((folder) => folder !== "");
  return folders.map((folder) => pythonOf(join(folder, "k8e"))).filter((python) => python !== undefined);
}

/** The Python that runs a command of ours; install.sh and pip write one each. */
function pythonOf(command: string): string | undefined {
  let text: string;
  try {
    text = readFileSync(command).subarray(0, MAX_SCRIPT).toString("utf8");
  } catch {
    return undefined;
  }
  if (!text.includes("The command k8e, written by install.sh") && !text.includes("from k8e.cli import")) return undefined;
  // A path that cannot stand in a shebang line: pip and install.sh let the shell start it.
  const found = /^#!(\/\S+\/python[\d.]*)\s/.exec(text) ?? /exec'? ['"]?(\/[^'"\n]*\/python[\d.]*)['"]? /.exec(text);
  return found?.[1];
}

function homeOf(python: string): string {
  const environment = dirname(dirname(python));
  if (!environment.endsWith("/venv")) return "";
  const home = dirname(environment);
  return home !== ownHome() && home !== SYSTEM_HOME && existsSync(join(home, "bin")) ? home : "";
}

function exists(path: string): boolean {
  try {
    lstatSync(path);
    return true;
  } catch {
    return false;
  }
}

/** Why starting a program is not safe: another user could have put it there. */
function unsafe(program: string): string {
  try {
    for (const path of new Set([...upwards(program), ...upwards(realpathSync(program))])) {
      const problem = changeable(path, lstatSync(path));
      if (problem) return problem;
    }
  } catch (error) {
    return (error as Error).message;
  }
  return "";
}

function changeable(path: string, found: Stats): string {
  if (found.uid !== 0 && found.uid !== uid()) return `${path} belongs to uid ${found.uid}`;
  if (found.isSymbolicLink()) return ""; // its folder says who may replace it
  const isSticky = found.isDirectory() && (found.mode & 0o1000) !== 0;
  return (found.mode & 0o022) !== 0 && !isSticky ? `other users may change ${path} (chmod go-w ${path})` : "";
}

function upwards(path: string): string[] {
  const paths = [path];
  for (let at = path; at !== dirname(at); ) {
    at = dirname(at);
    paths.push(at);
  }
  return paths;
}
