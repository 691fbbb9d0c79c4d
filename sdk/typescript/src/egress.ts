/**
 * Egress: what a session may reach, and what it was refused.
 *
 * @module
 */

import { fill } from "./records.ts";
import { type Denial, denials } from "./results.ts";
import type { Dict } from "./wire.ts";

/** What a session may reach, and what it was refused. */
export interface Egress {
  readonly sessionId: string;
  /** The policy in the words that were asked for. */
  readonly allowedHosts: readonly string[];
  /** The policy in effect: `default` is spelled out. */
  readonly rules: readonly string[];
  /** Whether this session has a network at all; `reason` says why not. */
  readonly network: boolean;
  readonly reason: string;
  /** How often something was refused in all. */
  readonly denied: number;
  /** The newest refusals, newest last. */
  readonly denials: readonly Denial[];
}

const EGRESS: Omit<Egress, "denials"> = { sessionId: "", allowedHosts: [], rules: [], network: false, reason: "", denied: 0 };

export function egress(told: Dict): Egress {
  return { ...fill(EGRESS, told), denials: denials(told.denials) };
}
