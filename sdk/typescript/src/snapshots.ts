/**
 * Snapshots: saved workspaces, for sessions to begin with.
 *
 * @module
 */

import { fill } from "./records.ts";
import type { Dict } from "./wire.ts";

/** The /workspace of a session at the time when it was saved. */
export interface Snapshot {
  readonly name: string;
  /** Seconds since 1970. */
  readonly createdAt: number;
  /** Files and links; folders are not counted. */
  readonly fileCount: number;
  /** Of its archive. */
  readonly sizeBytes: number;
  /** Of its archive; empty if only a name is known here, and no content. */
  readonly digest: string;
  /** The session that it was made from. */
  readonly sessionId: string;
  readonly layers: readonly string[];
}

const SNAPSHOT: Snapshot = { name: "", createdAt: 0, fileCount: 0, sizeBytes: 0, digest: "", sessionId: "", layers: [] };

export function snapshot(told: Dict): Snapshot {
  return fill(SNAPSHOT, told);
}
