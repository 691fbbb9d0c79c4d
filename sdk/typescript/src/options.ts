/**
 * Options as callers write them. One that nobody knows is refused, since what is misspelt would count for
 * nothing: of an egress policy, say.
 *
 * @module
 */

import { InvalidRequest } from "./errors.ts";

/** The names of all options of a kind; the compiler sees to it that none is missing. */
export type Names<Options> = Readonly<Record<keyof Options, true>>;

export const CALL_NAMES = { signal: true, requestTimeout: true } as const;

/** Names that other SDKs have for what is called otherwise here. */
const ELSEWHERE: Readonly<Record<string, string>> = {
  cpu: "cpus",
  envs: "env",
  envvars: "env",
  metadata: "labels",
  sandboxid: "sessionId",
  ttl: "lifetime",
};

/** Refuses options with names that are not known. */
export function checkOptions(where: string, options: object, known: Readonly<Record<string, true>>): void {
  if (!isOptions(options)) {
    throw new InvalidRequest(`${where} takes an object of options, not ${shown(options)}`, {
      hint: `its options are ${Object.keys(known).sort().join(", ")}`,
    });
  }
  for (const name of Object.keys(options)) {
    if (Object.hasOwn(known, name)) continue;
    const close = closest(name, Object.keys(known));
    throw new InvalidRequest(`${where} has no option ${name.slice(0, 80)}`, {
      hint: close === undefined ? `its options are ${Object.keys(known).sort().join(", ")}` : `did you mean ${close}?`,
    });
  }
}

/** Options, or a time-out in their place. */
export function optionsOf<Options extends { timeout?: number | undefined }>(given: number | Options): Options {
  if (typeof given === "number") return { timeout: given } as Options;
  if (isOptions(given)) return given;
  throw new InvalidRequest(`options are an object, or a time-out in seconds, not ${shown(given)}`, {
    hint: 'a command with arguments is one list: ["ls", "-l"]',
  });
}

function isOptions(given: unknown): boolean {
  return typeof given === "object" && given !== null && !Array.isArray(given);
}

function shown(given: unknown): string {
  return typeof given === "string" ? JSON.stringify(given.slice(0, 80)) : Array.isArray(given) ? "a list" : String(given);
}

function closest(name: string, known: readonly string[]): string | undefined {
  const plain = (text: string): string => text.toLowerCase().replaceAll(/[^a-z0-9]/g, "");
  const wanted = plain(name);
  const also = ELSEWHERE[wanted];
  if (also !== undefined && known.includes(also)) return also;
  const same = known.find((one) => plain(one) === wanted);
  return same ?? known.find((one) => wanted.length > 2 && (plain(one).startsWith(wanted) || wanted.startsWith(plain(one))));
}
