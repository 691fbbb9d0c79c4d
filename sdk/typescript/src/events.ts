/**
 * Events: the history of sessions.
 *
 * @module
 */

import { GuestFailed } from "./errors.ts";

/** One event of a session. */
export interface Event {
  /** Seconds since 1970. */
  readonly at: number;
  /** Its number in the session, from 1; older events may have been dropped. */
  readonly seq: number;
  /** Like `exec.started`. */
  readonly kind: string;
  readonly sessionId: string;
  /** What else is known about it; that depends on its kind. */
  readonly fields: Readonly<Record<string, unknown>>;
}

/** An event from its line of JSON. */
export function event(line: string): Event {
  const { at, seq, kind, session_id: sessionId, ...fields } = parsed(line);
  return { at: Number(at), seq: Number(seq), kind: String(kind), sessionId: String(sessionId), fields };
}

/** A line of JSON that must be a mapping. */
export function parsed(line: string): Record<string, unknown> {
  try {
    const found: unknown = JSON.parse(line);
    if (typeof found === "object" && found !== null) return found as Record<string, unknown>;
  } catch {
    // The same as another kind of JSON.
  }
  throw new GuestFailed("the gateway answered with a line that is no mapping");
}
