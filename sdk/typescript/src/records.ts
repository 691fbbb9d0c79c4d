/**
 * Gateways' answers as values of the SDK: names in camelCase, and the promised types.
 *
 * @module
 */

import { GuestFailed } from "./errors.ts";
import type { Dict, Value } from "./wire.ts";

const names = new Map<string, string>();

/** The name of a field on the wire. */
export function wireName(name: string): string {
  let found = names.get(name);
  if (found === undefined) {
    found = name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
    names.set(name, found);
  }
  return found;
}

/** A name as TypeScript has it. */
export function camelCase(name: string): string {
  return name.replace(/_([a-z0-9])/g, (_, letter: string) => letter.toUpperCase());
}

/**
 * A record with the fields of `shape`, filled from the wire. What is missing there, or of another type, stays
 * as it is in `shape`; a newer gateway may send more than this client knows.
 */
export function fill<Shape extends object>(shape: Shape, told: Dict): Shape {
  const made: Record<string, unknown> = {};
  for (const [name, usual] of Object.entries(shape)) made[name] = fitted(told[wireName(name)], usual as unknown);
  return made as Shape;
}

function fitted(value: Value | undefined, usual: unknown): unknown {
  if (value === undefined) return Array.isArray(usual) ? [...(usual as unknown[])] : usual;
  if (typeof usual === "number") return typeof value === "number" || typeof value === "bigint" ? Number(value) : usual;
  if (typeof usual === "bigint") {
    return typeof value === "bigint" || (typeof value === "number" && Number.isInteger(value)) ? BigInt(value) : usual;
  }
  if (usual === null || usual === undefined) return plain(value);
  if (Array.isArray(usual)) return Array.isArray(value) ? value.map(plain) : usual;
  if (typeof usual === "object") return isDict(value) ? plain(value) : usual;
  return typeof value === typeof usual ? value : usual;
}

/** Whether a value is a mapping. */
export function isDict(value: Value | undefined): value is Dict {
  return typeof value === "object" && value !== null && !Array.isArray(value) && !(value instanceof Uint8Array);
}

/** A value whose mappings are ordinary objects, with their keys as they are. */
export function plain(value: Value): unknown {
  if (Array.isArray(value)) return value.map(plain);
  if (!isDict(value)) return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, plain(item)]));
}

/** The same, with its own keys in camelCase and those of what is in it as they are. */
export function named(told: Dict): Record<string, unknown> {
  return Object.fromEntries(Object.entries(told).map(([key, item]) => [camelCase(key), plain(item)]));
}

/** The mappings of a list in an answer. */
export function dicts(value: Value | undefined): Dict[] {
  if (!Array.isArray(value)) throw new GuestFailed("the gateway's answer lacks a list");
  return value.filter(isDict);
}

/** Text of an answer. */
export function text(value: Value | undefined): string {
  if (typeof value !== "string") throw new GuestFailed("the gateway's answer lacks a text");
  return value;
}

/** A number of an answer. */
export function number(value: Value | undefined): number {
  if (typeof value !== "number" && typeof value !== "bigint") throw new GuestFailed("the gateway's answer lacks a number");
  return Number(value);
}

/** Texts of an answer. */
export function texts(value: Value | undefined): string[] {
  if (!Array.isArray(value)) throw new GuestFailed("the gateway's answer lacks a list");
  return value.map(String);
}
