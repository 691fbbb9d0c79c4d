/**
 * k8e: run untrusted, AI-written code in isolated sandboxes.
 *
 * @packageDocumentation
 */

export type { Approval, ConfirmOptions } from "./approvals.ts";
export type { AuditCheck, AuditFilter, AuditRow } from "./audit.ts";
export { type ClientOptions, SandboxClient, type SnapshotProgress, type TimeoutOr } from "./client.ts";
export type { Command, ExecOptions, Language, RunOptions } from "./commands.ts";
export type { CallOptions } from "./connections.ts";
export type { Content, Piece, Progress } from "./content.ts";
export {
  Context,
  type ContextInfo,
  type ContextLanguage,
  type CreateContextOptions,
  Execution,
  type ExecutionError,
  type ExecutionEvent,
  type ExecutionOptions,
  Result,
} from "./contexts.ts";
export type { Egress } from "./egress.ts";
export type { EndpointOptions } from "./endpoints.ts";
export * as errors from "./errors.ts";
export { K8eError } from "./errors.ts";
export type { Event } from "./events.ts";
export { Exposed, type WaitOptions } from "./exposures.ts";
export type { FileEntry, FileType, ListOptions, ReadOptions, WriteOptions } from "./files.ts";
export type { Image } from "./images.ts";
export { type OneshotOptions, sandboxRun, sandboxSession } from "./oneshot.ts";
export type { PoolInfo, SetPoolOptions } from "./pool.ts";
export { InputClosed, OutputEnded, Process } from "./processes.ts";
export {
  type Denial,
  type ExecEvent,
  type ExecInfo,
  ExecResult,
  type Exit,
  type Foreground,
  Output,
  type ProcessInfo,
  type ReachedLimit,
  type RunState,
  type Status,
  type Stderr,
  type Stdout,
} from "./results.ts";
export { type OutputOptions, Run } from "./runs.ts";
export { type ConnectOptions, Sandbox, SandboxFiles, type SandboxOptions } from "./sandbox.ts";
export type { SecretInfo, SecretOptions } from "./secrets.ts";
export type { Limits, ManifestEntry, SessionInfo, SessionOptions } from "./sessions.ts";
export type { Snapshot } from "./snapshots.ts";
export type { Recipe, Template } from "./templates.ts";
export type { Copied, CopyOptions } from "./trees.ts";
export type { Packable } from "./wire.ts";
export { version } from "./version.ts";
