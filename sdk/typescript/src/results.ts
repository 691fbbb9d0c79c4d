/**
 * Results of programs.
 *
 * @module
 */

import { inspect, type InspectOptions } from "node:util";

import { decode } from "./content.ts";
import { dicts, fill, isDict, number, plain, text } from "./records.ts";
import { type Dict, sequence, SEQ_SIZE, type Value } from "./wire.ts";

/** How a program ended. */
export type Status = "completed" | "timed_out" | "killed";

/** Bytes that a program wrote to its standard output. */
export interface Stdout {
  readonly type: "stdout";
  readonly data: Uint8Array;
  /** Number of the first byte, counted over both streams of the program. */
  readonly seq: number;
}

/** Bytes that a program wrote to its standard error. */
export interface Stderr {
  readonly type: "stderr";
  readonly data: Uint8Array;
  readonly seq: number;
}

/** A destination that a sandbox's policy refused. Not an outage. */
export interface Denial {
  /** The host name, if it is known; empty for a bare address, `*` for every host. */
  readonly name: string;
  /** Empty for a name that was not resolved. */
  readonly address: string;
  readonly port: number;
  /** `tcp`, `udp`, `icmp` or `dns`; `any` where there is no network at all. */
  readonly protocol: string;
  /** Why, in words. */
  readonly rule: string;
  /** How often, in a row or in the run. */
  readonly count: number;
  /** Seconds since 1970 of the last one; 0 in the result of a run, which was just now. */
  readonly at: number;
}

const DENIAL: Denial = { name: "", address: "", port: 0, protocol: "", rule: "", count: 1, at: 0 };

/** A limit that a program met, and may have failed for. */
export interface ReachedLimit {
  /** `memory`, `pids`, `disk`, `inodes`, `open_files` or `output` of the session, or `timeout` of the run. */
  readonly limit: string;
  /** How much the session may have; the seconds of a run, 0 if they are not known. */
  readonly value: number;
  /** What it means, and how to have more, in words. */
  readonly message: string;
}

const REACHED: ReachedLimit = { limit: "", value: 0, message: "" };

/** The end of a program. */
export interface Exit {
  readonly type: "exit";
  /** Its exit code; 128 + n if signal n ended it. */
  readonly exitCode: number;
  readonly status: Status;
  readonly signal: number;
  readonly durationMs: number;
  /** Whether output above the limit was dropped. */
  readonly truncated: boolean;
  readonly sessionId: string;
  readonly execId: string;
  /** What the session's policy refused while the program ran. */
  readonly denials: readonly Denial[];
  /** The limits of the session that it met, if it failed. */
  readonly limits: readonly ReachedLimit[];
}

/** Events while a program runs; last comes the {@link Exit}. */
export type ExecEvent = Stdout | Stderr | Exit;

/** Output that was collected. */
export class Output {
  readonly stdoutBytes: Uint8Array;
  readonly stderrBytes: Uint8Array;

  constructor(stdout: Uint8Array, stderr: Uint8Array) {
    this.stdoutBytes = stdout;
    this.stderrBytes = stderr;
  }

  /** The output as text; invalid UTF-8 is replaced. */
  get stdout(): string {
    return decode(this.stdoutBytes);
  }

  get stderr(): string {
    return decode(this.stderrBytes);
  }
}

/** The result of a program that has ended. A failing program is a result, not an error. */
export class ExecResult extends Output {
  readonly exitCode: number;
  readonly status: Status;
  readonly durationMs: number;
  /** Whether output above the limit was dropped. */
  readonly truncated: boolean;
  readonly sessionId: string;
  readonly execId: string;
  /** What the session's policy refused while the program ran; usually nothing. */
  readonly denials: readonly Denial[];
  /** The limits of the session that it met, if it failed; usually none. */
  readonly limits: readonly ReachedLimit[];

  constructor(exit: Exit, stdout: Uint8Array, stderr: Uint8Array) {
    super(stdout, stderr);
    this.exitCode = exit.exitCode;
    this.status = exit.status;
    this.durationMs = exit.durationMs;
    this.truncated = exit.truncated;
    this.sessionId = exit.sessionId;
    this.execId = exit.execId;
    this.denials = exit.denials;
    this.limits = exit.limits;
  }

  /** What `console.log` shows: text, not bytes. @internal */
  [inspect.custom](_depth: number, options: InspectOptions): string {
    return `ExecResult ${inspect(this.toJSON(), options)}`;
  }

  /** Everything but the bytes, for JSON. */
  toJSON(): Omit<ExecResult, "stdoutBytes" | "stderrBytes" | "toJSON" | typeof inspect.custom> {
    const { stdout, stderr, exitCode, status, durationMs, truncated, sessionId, execId, denials, limits } = this;
    return { stdout, stderr, exitCode, status, durationMs, truncated, sessionId, execId, denials, limits };
  }
}

/** A program that runs or ran in a session. */
export interface ExecInfo {
  readonly execId: string;
  readonly pid: number;
  readonly argv: readonly string[];
  readonly status: Status | "running";
  /** Undefined while it runs. */
  readonly exitCode: number | undefined;
  readonly durationMs: number;
  /** Whether it was started to run on without its caller. */
  readonly background: boolean;
}

/** A background run at one moment. */
export interface RunState {
  readonly runId: string;
  readonly sessionId: string;
  readonly execId: string;
  readonly status: Status | "running";
  /** Undefined while it runs. */
  readonly exitCode: number | undefined;
  readonly durationMs: number;
  readonly stdout: string;
  readonly stderr: string;
  readonly stdoutBytes: Uint8Array;
  readonly stderrBytes: Uint8Array;
  /** Whether older output is no longer kept. */
  readonly truncated: boolean;
}

/** A process in a sandbox, as the programs in there see it. */
export interface ProcessInfo {
  readonly pid: number;
  readonly ppid: number;
  /** The name of its program, at most 15 bytes. */
  readonly comm: string;
  /** A letter of `ps`: `R` runs, `S` sleeps, `Z` has ended. */
  readonly state: string;
}

const PROCESS: ProcessInfo = { pid: 0, ppid: 0, comm: "", state: "" };

/** The foreground process group of a terminal. */
export interface Foreground {
  /** As programs in the sandbox see it; -1 if it is not known, which on gVisor is often so. */
  readonly processGroupId: number;
  /** Whether that group is known, all of it sleeps, and there is no input that it could read. */
  readonly inputWaiting: boolean;
}

// From the wire.

export function denials(value: Value | undefined): Denial[] {
  return Array.isArray(value) ? value.filter(isDict).map((item) => fill(DENIAL, item)) : [];
}

export function reachedLimits(value: Value | undefined): ReachedLimit[] {
  return Array.isArray(value) ? value.filter(isDict).map((item) => fill(REACHED, item)) : [];
}

export function outputEvent(type: "stdout" | "stderr", body: Buffer): Stdout | Stderr {
  return { type, data: body.subarray(SEQ_SIZE), seq: sequence(body) };
}

export function exitEvent(told: Dict, sessionId: string, execId: string): Exit {
  return {
    type: "exit",
    exitCode: number(told.code),
    status: text(told.status) as Status,
    signal: number(told.signal),
    durationMs: number(told.duration_ms),
    truncated: told.truncated === true,
    sessionId,
    execId,
    denials: denials(told.denials),
    limits: reachedLimits(told.limits),
  };
}

export function exitCode(value: Value | undefined): number | undefined {
  return value === null || value === undefined ? undefined : number(value);
}

export function execInfo(told: Dict): ExecInfo {
  return {
    execId: text(told.id),
    pid: number(told.pid),
    argv: plain(told.argv ?? []) as string[],
    status: text(told.status) as Status | "running",
    exitCode: exitCode(told.code),
    durationMs: number(told.duration_ms),
    background: told.background === true,
  };
}

export function processes(told: Dict): ProcessInfo[] {
  return dicts(told.processes).map((item) => fill(PROCESS, item));
}

export function foreground(told: Dict): Foreground {
  return { processGroupId: number(told.process_group_id), inputWaiting: told.input_waiting === true };
}
