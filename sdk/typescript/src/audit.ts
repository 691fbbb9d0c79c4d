/**
 * The audit trail: who did what.
 *
 * @module
 */

import type { CallOptions } from "./connections.ts";
import { parsed } from "./events.ts";
import { fill, texts } from "./records.ts";
import type { Dict, Packable } from "./wire.ts";

/** One action of a caller, or its refusal. */
export interface AuditRow {
  /** Its number, from 1, without gaps. */
  readonly seq: number;
  /** Seconds since 1970. */
  readonly at: number;
  /** Like `exec.started`. */
  readonly action: string;
  readonly outcome: "allowed" | "denied";
  /** The principal; empty if it is not known. */
  readonly principal: string;
  /** How that is known: `socket`, `loopback`, `key`, `certificate`, or `gateway`. */
  readonly via: string;
  readonly peer: string;
  readonly session: string;
  /** Whose session it is. */
  readonly owner: string;
  readonly detail: Readonly<Record<string, unknown>>;
  readonly hash: string;
}

/** A selection of rows of the audit trail. */
export interface AuditFilter extends CallOptions {
  sessionId?: string | undefined;
  principal?: string | undefined;
  /** Seconds since 1970. */
  since?: number | undefined;
  until?: number | undefined;
  /** One action, or all of a kind with a `*` at the end. */
  action?: string | undefined;
  denied?: boolean | undefined;
  limit?: number | undefined;
}

/** The result of a check of the audit trail. */
export interface AuditCheck {
  readonly ok: boolean;
  readonly problems: readonly string[];
  readonly rows: number;
  readonly first: number;
  /** Give it to the next check: it shows that nothing before was changed. */
  readonly head: string;
}

const CHECK: AuditCheck = { ok: false, problems: [], rows: 0, first: 0, head: "" };
const LIMIT = 500;

export function auditCall(wanted: AuditFilter): Packable {
  return {
    op: "audit",
    limit: wanted.limit ?? LIMIT,
    session_id: wanted.sessionId,
    principal: wanted.principal,
    since: wanted.since,
    until: wanted.until,
    action: wanted.action,
    denied: wanted.denied,
  };
}

export function auditRows(told: Dict): AuditRow[] {
  return texts(told.rows).map((line) => {
    const row = parsed(line) as unknown as AuditRow;
    return { ...row, owner: row.owner || row.principal };
  });
}

export function auditCheck(told: Dict): AuditCheck {
  return fill(CHECK, told);
}
