/**
 * Approvals: ask before an action, decide on it.
 *
 * @module
 */

import type { CallOptions } from "./connections.ts";
import { fill } from "./records.ts";
import type { Dict } from "./wire.ts";

/** One action that an approver is asked to allow, once. */
export interface Approval {
  readonly approvalId: string;
  readonly sessionId: string;
  /** The exact text that was asked for. */
  readonly action: string;
  readonly status: "pending" | "approved" | "rejected" | "used" | "expired";
  readonly approved: boolean;
  /** Whether it was (or can be) decided without an approver's secret, so by the asker too. */
  readonly advisory: boolean;
  /** The approver's words. */
  readonly reason: string;
  /** Seconds since 1970. */
  readonly createdAt: number;
  /** Seconds since 1970; what is not approved and acted on until then never will be. */
  readonly expiresAt: number;
  /** Seconds since 1970; 0 while it is pending. */
  readonly decidedAt: number;
}

const APPROVAL: Approval = {
  approvalId: "",
  sessionId: "",
  action: "",
  status: "pending",
  approved: false,
  advisory: false,
  reason: "",
  createdAt: 0,
  expiresAt: 0,
  decidedAt: 0,
};

/** How to ask for an action. */
export interface ConfirmOptions extends CallOptions {
  /** Seconds to wait for the decision; 0 means the gateway's own 300. */
  timeout?: number | undefined;
  /** False registers the action and returns at once. */
  wait?: boolean | undefined;
  /** Wait for what was registered before, with the same session and action. */
  approvalId?: string | undefined;
  /** Seconds in which it can be approved and acted on; 0 means an hour. */
  expires?: number | undefined;
}

export function approval(told: Dict): Approval {
  return fill(APPROVAL, told);
}
