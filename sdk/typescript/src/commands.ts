/**
 * Running programs: what is asked of the gateway, and reading what they print.
 *
 * @module
 */

import type { Lane } from "./connection.ts";
import { type CallOptions, checkError, type Connections, isLost, pause, RETRY_DELAYS } from "./connections.ts";
import { checkContent, type Content, feed } from "./content.ts";
import {
  GuestFailed,
  InvalidRequest,
  type K8eError,
  LimitExceeded,
  ProgramLost,
} from "./errors.ts";
import { CALL_NAMES, checkOptions, type Names } from "./options.ts";
import { text } from "./records.ts";
import { type ExecEvent, ExecResult, type Exit, exitEvent, outputEvent } from "./results.ts";
import * as wire from "./wire.ts";

/** What source code can be written in. */
export type Language =
  | "bash"
  | "sh"
  | "shell"
  | "python"
  | "python3"
  | "py"
  | "node"
  | "nodejs"
  | "js"
  | "javascript"
  | "ts"
  | "typescript";

/** Text goes to `/bin/sh -c`, a list is started as it is. */
export type Command = string | readonly string[];

/** The options that every way of running a program has. */
export interface ExecOptions extends CallOptions {
  /** Seconds after which it is killed; 0 means never. */
  timeout?: number | undefined;
  /** What it reads. */
  stdin?: Content | undefined;
  /** Variables, on top of the session's. */
  env?: Readonly<Record<string, string>> | undefined;
  /** Where to start; absolute, or relative to /workspace. */
  cwd?: string | undefined;
  /** Bytes kept of each stream; 0 means all. */
  outputLimit?: number | undefined;
  /** Chosen by the caller to make starting idempotent: a second start joins the first. */
  execId?: string | undefined;
  /** Kill it if this client's connection breaks (not only when it gives up). It is then not taken up again. */
  killOnDisconnect?: boolean | undefined;
  /** Rows and columns: run on a terminal, with both streams in stdout. */
  tty?: readonly [rows: number, columns: number] | undefined;
  /** Let it run on without readers, keeping only the newest output. */
  ring?: boolean | undefined;
}

/** Options of `run`. */
export interface RunOptions extends ExecOptions {
  /** Where to run it; by default the client's own or its tenant's session. */
  sessionId?: string | undefined;
  /** What that session is made from; the client makes one of its own for each. */
  template?: string | undefined;
}

/** Of all ways to run something, contexts included. */
const EXEC_NAMES: Names<RunOptions & Record<"language" | "rows" | "columns" | "onStdout" | "onStderr" | "onResult", unknown>> = {
  ...CALL_NAMES,
  columns: true,
  cwd: true,
  env: true,
  execId: true,
  killOnDisconnect: true,
  language: true,
  onResult: true,
  onStderr: true,
  onStdout: true,
  outputLimit: true,
  ring: true,
  rows: true,
  sessionId: true,
  stdin: true,
  template: true,
  timeout: true,
  tty: true,
};

/** Bytes of each stream that are kept if a program's output is collected. */
export const OUTPUT_LIMIT = 1 << 20;
const MAX_ARGUMENTS = wire.MAX_ITEMS - (1 << 10);
const KILL_MILLISECONDS = 5000;

/** A session, as operations name it. */
export type SessionName = { readonly id: string } | { readonly auto: string; readonly spec?: { readonly template: string } };

/** A call that starts a program. */
export interface ExecCall {
  readonly [key: string]: wire.Packable;
  readonly op: "exec";
  readonly session: Readonly<Record<string, wire.Packable>>;
  readonly id: string;
}

/** The session of this id. */
export function byId(sessionId: string): { readonly id: string } {
  if (typeof sessionId !== "string" || sessionId === "") {
    throw new InvalidRequest("the session id is empty", { hint: "createSession() makes a session and gives its id" });
  }
  return { id: sessionId };
}

/** The standing session of a tenant. */
export function auto(tenant: string, template = ""): SessionName {
  return template ? { auto: tenant, spec: { template } } : { auto: tenant };
}

export function newExecId(): string {
  return crypto.randomUUID().replaceAll("-", "").slice(0, 16);
}

/** Run source code. */
export function codeCall(session: SessionName, code: string | Uint8Array, language: string, options: ExecOptions): ExecCall {
  if (typeof code !== "string" && !((code as unknown) instanceof Uint8Array)) {
    throw new InvalidRequest("the code is neither text nor bytes", { hint: 'write run("print(1)", "python")' });
  }
  if (typeof language !== "string") {
    throw new InvalidRequest("the language is no text", { hint: 'options come last: run(code, "python", { timeout: 5 })' });
  }
  const data = typeof code === "string" ? wire.escapedBytes(code) : code;
  if (data.length > wire.MAX_CODE) {
    throw new LimitExceeded(`the code is ${data.length} bytes long; the limit is ${wire.MAX_CODE}`, {
      hint: "write it to a file in the sandbox and run that",
    });
  }
  return { ...execCall(session, options), code: data, language };
}

/** Run a command. */
export function commandCall(session: SessionName, command: Command, options: ExecOptions): ExecCall {
  return { ...execCall(session, options), argv: argvOf(command) };
}

function argvOf(command: Command): readonly string[] {
  if (typeof command === "string") {
    if (command.trim() === "") throw new InvalidRequest("the command is empty", { hint: "say what to run" });
    return ["/bin/sh", "-c", command];
  }
  if (!Array.isArray(command) || command.length === 0) {
    throw new InvalidRequest("the command is neither text nor a list of texts", { hint: 'write ["ls", "-l"] or "ls -l"' });
  }
  if (command.length > MAX_ARGUMENTS) {
    throw new LimitExceeded(`the command has ${command.length} arguments; the limit is ${MAX_ARGUMENTS}`, {
      hint: "write them to a file in the sandbox, and let xargs read that",
    });
  }
  return command as readonly string[];
}

function execCall(session: SessionName, options: ExecOptions): ExecCall {
  checkOptions("a run", options, EXEC_NAMES);
  const call: Record<string, wire.Packable> = {
    op: "exec",
    session: session,
    id: options.execId || newExecId(),
    timeout: options.timeout ?? 0,
    limit: options.outputLimit ?? OUTPUT_LIMIT,
    stdin: options.stdin !== undefined,
    kill_on_disconnect: options.killOnDisconnect ?? false,
    output: options.ring === true ? "ring" : "block",
  };
  if (options.env !== undefined) call.env = options.env;
  if (options.cwd) call.cwd = options.cwd;
  if (options.tty !== undefined) call.tty = options.tty;
  return call as ExecCall;
}

/** The same program in the background: without readers, so that it never waits for one. */
export function inBackground(call: ExecCall, limit: number): ExecCall {
  return { ...call, background: true, kill_on_disconnect: false, limit, output: "ring", window: 1 };
}

/** The id of a run: its session and its exec, so that no table is needed. */
export function runId(sessionId: string, execId: string): string {
  return `${sessionId}.${execId}`;
}

/** Session and exec of a run. */
export function splitRunId(id: string): readonly [sessionId: string, execId: string] {
  const dot = id.indexOf(".");
  if (dot <= 0 || dot === id.length - 1) {
    throw new InvalidRequest(`'${id.slice(0, 120)}' is not the id of a run`, {
      hint: "a run id is what start() gives as runId, like sess-….…",
    });
  }
  return [id.slice(0, dot), id.slice(dot + 1)];
}

/** An operation on a run. */
export function runCall(op: string, id: string, fields: Record<string, wire.Packable> = {}): Record<string, wire.Packable> {
  const [sessionId, execId] = splitRunId(id);
  return { op, session: byId(sessionId), id: execId, ...fields };
}

/** One program, and its output. Lost connections are made again if possible. */
export class RunningCommand {
  private readonly connections: Connections;
  private readonly call: ExecCall;
  private readonly signal: AbortSignal | undefined;
  private lane: Lane;
  private readonly sessionId: string;
  private readonly execId: string;
  private at = 0; // the number of the next byte
  private over = false;
  private sourceFailure: unknown;

  private constructor(
    connections: Connections,
    call: ExecCall,
    begun: { lane: Lane; told: wire.Dict },
    options: ExecOptions,
  ) {
    this.connections = connections;
    this.call = call;
    this.signal = options.signal;
    this.lane = begun.lane;
    this.sessionId = text(begun.told.session_id);
    this.execId = text(begun.told.id);
    if (options.stdin !== undefined) this.feed(options.stdin);
  }

  /** Starts a program. */
  static async start(connections: Connections, call: ExecCall, options: ExecOptions, own: boolean): Promise<RunningCommand> {
    if (options.stdin !== undefined) checkContent(options.stdin);
    const { signal, starting } = connections.programLimits(options);
    try {
      const begun = await connections.begin(call, { own, signal, starting });
      return new RunningCommand(connections, call, begun, { ...options, signal });
    } catch (error) {
      // It may have begun; a signal must not leave anything that runs.
      if (starting?.aborted === true) await killed(connections, call);
      throw error;
    }
  }

  private feed(content: Content): void {
    feed(this.lane, content, { kind: wire.STDIN, end: wire.STDIN_END }).catch((error: unknown) => {
      this.sourceFailure = error;
      this.lane.fail(new InvalidRequest("what the program was to read could not be read"));
    });
  }

  /** The next event; undefined after the exit. */
  async next(): Promise<ExecEvent | undefined> {
    if (this.over) return undefined;
    for (;;) {
      try {
        const frame = this.lane.poll();
        if (frame === undefined) {
          await this.lane.arrival();
          continue;
        }
        const event = this.event(frame.kind, frame.body);
        if (event !== undefined) return event;
      } catch (error) {
        await this.recover(error);
      }
    }
  }

  private event(kind: number, body: Buffer): ExecEvent | undefined {
    switch (kind) {
      case wire.OUT:
      case wire.ERR: {
        const event = outputEvent(kind === wire.OUT ? "stdout" : "stderr", body);
        this.at = event.seq + event.data.length;
        this.lane.consume(event.data.length);
        return event;
      }
      case wire.SHOW: // of a context; whoever wants results uses its stream
        this.at = wire.sequence(body) + body.length - wire.SEQ_SIZE;
        this.lane.consume(body.length - wire.SEQ_SIZE);
        return undefined;
      case wire.EXIT: {
        const told = wire.unpackDict(body);
        const exit = exitEvent(told, this.sessionId, this.execId);
        this.over = true;
        this.connections.finish(this.lane);
        return told.lost === true ? { ...exit, truncated: true } : exit;
      }
      default:
        checkError({ kind, body });
        return undefined;
    }
  }

  /** Takes a lost connection up where it was, or raises the error. */
  private async recover(error: unknown): Promise<void> {
    if (this.sourceFailure !== undefined) {
      await this.kill();
      throw this.sourceFailure;
    }
    if (!isLost(error) || this.call.kill_on_disconnect === true || this.call.stdin === true || this.connections.closed) {
      this.over = true;
      this.connections.abandon(this.lane);
      if (this.signal?.aborted === true) await this.kill();
      throw isLost(error) ? new ProgramLost(error, this.sessionId, this.execId) : error;
    }
    this.connections.abandon(this.lane);
    const lane = await this.attached(error);
    if (lane === undefined) {
      this.over = true;
      throw new ProgramLost(error, this.sessionId, this.execId);
    }
    this.lane = lane;
  }

  private async attached(error: K8eError): Promise<Lane | undefined> {
    const attach = { op: "attach", session: { id: this.sessionId }, id: this.execId, seq: this.at };
    let last: unknown = error;
    for (const delay of [...RETRY_DELAYS, 1000, 2000]) {
      if (!isLost(last)) return undefined;
      await pause(delay, this.signal);
      try {
        return (await this.connections.begin(attach, { own: true, signal: this.signal })).lane;
      } catch (failure) {
        if (this.signal?.aborted === true) throw failure;
        last = failure;
      }
    }
    return undefined;
  }

  /** Ends the program, unless it has ended. */
  async kill(): Promise<void> {
    if (!this.over) this.connections.abandon(this.lane);
    this.over = true;
    await killed(this.connections, this.call, this.sessionId);
  }
}

/** Kills what a call started; bounded, and errors do not matter. */
async function killed(connections: Connections, call: ExecCall, sessionId?: string): Promise<void> {
  const session = sessionId === undefined ? call.session : { id: sessionId };
  const terminate = { op: "signal", session, id: call.id, terminate: true };
  try {
    await connections.call(terminate, { signal: AbortSignal.timeout(KILL_MILLISECONDS) });
  } catch {
    // It has ended, or the gateway has.
  }
}

/** Runs a program and collects its output. */
export async function collect(connections: Connections, call: ExecCall, options: ExecOptions): Promise<ExecResult> {
  const command = await RunningCommand.start(connections, call, options, options.stdin !== undefined);
  const out: Uint8Array[] = [];
  const err: Uint8Array[] = [];
  for (let event = await command.next(); event !== undefined; event = await command.next()) {
    if (event.type === "exit") return new ExecResult(event, joined(out), joined(err));
    (event.type === "stdout" ? out : err).push(event.data);
  }
  throw new GuestFailed("the program ended without saying how");
}

/** Runs a program while iterating over its events; leaving the loop kills it. */
export async function* events(
  connections: Connections,
  call: ExecCall,
  options: ExecOptions,
  running: Set<RunningCommand>,
): AsyncGenerator<ExecEvent, void, void> {
  const command = await RunningCommand.start(connections, call, options, true);
  running.add(command);
  let ended = false;
  try {
    for (let event = await command.next(); event !== undefined; event = await command.next()) {
      ended = event.type === "exit";
      yield event;
    }
  } catch (error) {
    ended = true; // nothing of it is left, or it cannot be reached
    throw error;
  } finally {
    running.delete(command);
    if (!ended) await command.kill();
  }
}

/** Bytes in one piece. */
export function joined(parts: readonly Uint8Array[]): Uint8Array {
  if (parts.length === 1 && parts[0] !== undefined) return parts[0];
  return Buffer.concat(parts);
}

/** Collects the output of what is read from afar, until its exit. */
export class Collected {
  private readonly out: Uint8Array[] = [];
  private readonly err: Uint8Array[] = [];
  private at = 0;
  private lost = false;
  private exit: Exit | undefined;

  add(event: ExecEvent): void {
    if (event.type === "exit") {
      this.exit = event;
      return;
    }
    this.lost ||= event.seq > this.at;
    this.at = event.seq + event.data.length;
    (event.type === "stdout" ? this.out : this.err).push(event.data);
  }

  result(): ExecResult {
    if (this.exit === undefined) throw new GuestFailed("the program ended without saying how");
    const exit = { ...this.exit, truncated: this.exit.truncated || this.lost };
    return new ExecResult(exit, joined(this.out), joined(this.err));
  }
}

