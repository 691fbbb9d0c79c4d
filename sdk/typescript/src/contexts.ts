/**
 * Contexts: programs that keep their variables from one run of code to the next, as a notebook does.
 *
 * @module
 */

import { byId, codeCall, joined, OUTPUT_LIMIT } from "./commands.ts";
import { type CallOptions, checkError, type Connections, isLost } from "./connections.ts";
import { decode } from "./content.ts";
import { ContextNotFound, GuestFailed, InvalidRequest, ProgramLost, SessionNotFound } from "./errors.ts";
import { dicts, fill, isDict, number, text, texts } from "./records.ts";
import {
  type Denial,
  denials,
  Output,
  outputEvent,
  type ReachedLimit,
  reachedLimits,
  type Status,
  type Stderr,
  type Stdout,
} from "./results.ts";
import * as wire from "./wire.ts";

/** A language of contexts. */
export type ContextLanguage = "python" | "bash" | "node";

const MAX_RESULTS = 1 << 16; // that are kept of one run
const MAX_RECORD = 8 << 20;

/** A value that code in a context displayed: the last expression, or an argument of `display`. */
export class Result {
  readonly type = "result";
  /** Every representation that it has, by media type; pictures and PDF as bytes. */
  readonly data: Readonly<Record<string, string | Uint8Array>>;
  /** Whether it is the value of the last expression. */
  readonly isMainResult: boolean;
  /** Media types that were too large. */
  readonly leftOut: readonly string[];

  constructor(data: Readonly<Record<string, string | Uint8Array>>, isMainResult: boolean, leftOut: readonly string[]) {
    this.data = data;
    this.isMainResult = isMainResult;
    this.leftOut = leftOut;
  }

  /** The media types that it has. */
  formats(): string[] {
    return Object.keys(this.data);
  }

  get text(): string | undefined {
    return this.asText("text/plain");
  }

  get html(): string | undefined {
    return this.asText("text/html");
  }

  get markdown(): string | undefined {
    return this.asText("text/markdown");
  }

  get svg(): string | undefined {
    return this.asText("image/svg+xml");
  }

  get latex(): string | undefined {
    return this.asText("text/latex");
  }

  get javascript(): string | undefined {
    return this.asText("application/javascript");
  }

  get png(): Uint8Array | undefined {
    return this.asBytes("image/png");
  }

  get jpeg(): Uint8Array | undefined {
    return this.asBytes("image/jpeg");
  }

  get pdf(): Uint8Array | undefined {
    return this.asBytes("application/pdf");
  }

  /** Its JSON as a value; undefined if it has none, or none that can be read. */
  get json(): unknown {
    const source = this.asText("application/json");
    if (source === undefined) return undefined;
    try {
      return JSON.parse(source) as unknown;
    } catch {
      return undefined;
    }
  }

  private asText(kind: string): string | undefined {
    const value = this.data[kind];
    return value instanceof Uint8Array ? decode(value) : value;
  }

  private asBytes(kind: string): Uint8Array | undefined {
    const value = this.data[kind];
    return typeof value === "string" ? wire.escapedBytes(value) : value;
  }
}

/** Why code in a context failed, in the words of its program. */
export interface ExecutionError {
  /** The exception's class, `KeyboardInterrupt` after an interrupt, `ContextEnded`. */
  readonly name: string;
  readonly value: string;
  /** As the language shows it. */
  readonly traceback: string;
}

const EXECUTION_ERROR: ExecutionError = { name: "", value: "", traceback: "" };

/** The outcome of code in a context. Code that fails is a result, not an error. */
export class Execution extends Output {
  readonly type = "execution";
  readonly error: ExecutionError | undefined;
  /** How many runs the context has had, with this one. */
  readonly executionCount: number;
  /** 0, or 1 after an error, 130 after an interrupt, or what the program itself says. */
  readonly exitCode: number;
  readonly status: Status;
  /** `ready` for more, or `ended`: then only a restart helps, and the variables are gone. */
  readonly contextState: "ready" | "ended";
  readonly sessionId: string;
  readonly contextId: string;
  readonly execId: string;
  readonly durationMs: number;
  /** Whether output or results above a limit were dropped. */
  readonly truncated: boolean;
  /** The results, in order. */
  readonly results: readonly Result[];
  readonly denials: readonly Denial[];
  readonly limits: readonly ReachedLimit[];

  /** @internal */
  constructor(gathered: Gathered, told: wire.Dict) {
    super(joined(gathered.stdout), joined(gathered.stderr));
    this.error = isDict(told.error) ? fill(EXECUTION_ERROR, told.error) : undefined;
    this.executionCount = number(told.execution_count);
    this.exitCode = number(told.code);
    this.status = text(told.status) as Status;
    this.contextState = text(told.context_state) as "ready" | "ended";
    this.sessionId = gathered.sessionId;
    this.contextId = gathered.contextId;
    this.execId = gathered.execId;
    this.durationMs = number(told.duration_ms);
    this.truncated = told.truncated === true || told.lost === true || gathered.dropped;
    this.results = gathered.results;
    this.denials = denials(told.denials);
    this.limits = reachedLimits(told.limits);
  }

  /** The value of the last expression, as text. */
  get text(): string | undefined {
    return this.results.find((item) => item.isMainResult)?.text;
  }
}

/** Events while code runs in a context; last comes the {@link Execution}. */
export type ExecutionEvent = Stdout | Stderr | Result | Execution;

/** A context of a session. */
export interface ContextInfo {
  readonly contextId: string;
  readonly sessionId: string;
  readonly language: string;
  /** Where it began. */
  readonly cwd: string;
  readonly state: "starting" | "ready" | "busy" | "ended";
  /** Why, if it has ended. */
  readonly endedBecause: string;
  readonly executionCount: number;
  /** Runs in line. */
  readonly waiting: number;
  /** Of its program; 0 if it has ended. */
  readonly pid: number;
}

/** Options of a new context. */
export interface CreateContextOptions extends CallOptions {
  /** Where it begins; absolute, or relative to /workspace. */
  cwd?: string | undefined;
  /** Letters, digits and hyphens; by default one is made. */
  contextId?: string | undefined;
}

/** How code runs in a context. */
export interface ExecutionOptions extends CallOptions {
  /** Seconds, with the time in line, after which it is interrupted; 0 means never. */
  timeout?: number | undefined;
  /** Variables for this run only. */
  env?: Readonly<Record<string, string>> | undefined;
  /** Called with bytes as they are printed. */
  onStdout?: ((data: Uint8Array) => void) | undefined;
  onStderr?: ((data: Uint8Array) => void) | undefined;
  /** Called with each result when it is shown. */
  onResult?: ((result: Result) => void) | undefined;
  /** Chosen by the caller: a second run with the same id joins the first. */
  execId?: string | undefined;
  /** Bytes kept of each stream; 0 means all. */
  outputLimit?: number | undefined;
}

/** Puts records together; one that was lost in part is left out. */
export class Records {
  private buffer: Buffer = Buffer.alloc(0);
  private next = 0;

  feed(body: Buffer): Result[] {
    const seq = wire.sequence(body);
    const data = body.subarray(wire.SEQ_SIZE);
    if (seq !== this.next) this.buffer = Buffer.alloc(0); // bytes in between were lost; it goes on with a record
    this.next = seq + data.length;
    this.buffer = this.buffer.length === 0 ? data : Buffer.concat([this.buffer, data]);
    const found: Result[] = [];
    while (this.buffer.length >= 4) {
      const end = 4 + this.buffer.readUInt32BE(0);
      if (end > MAX_RECORD + 4) throw new wire.WireError("a result that is too large");
      if (this.buffer.length < end) break;
      found.push(result(wire.unpackDict(this.buffer.subarray(4, end))));
      this.buffer = this.buffer.subarray(end);
    }
    return found;
  }
}

function result(record: wire.Dict): Result {
  const { data, main, left_out: leftOut } = record;
  if (!isDict(data) || typeof main !== "boolean") throw new wire.WireError("a result without its marks");
  const shown: Record<string, string | Uint8Array> = {};
  for (const [kind, value] of Object.entries(data)) {
    if (typeof value === "string" || value instanceof Uint8Array) shown[kind] = value;
  }
  return new Result(shown, main, texts(leftOut));
}

/** The output and results of a run so far. */
class Gathered {
  readonly stdout: Uint8Array[] = [];
  readonly stderr: Uint8Array[] = [];
  readonly results: Result[] = [];
  dropped = false;
  readonly sessionId: string;
  readonly execId: string;
  readonly contextId: string;

  constructor(told: wire.Dict) {
    this.sessionId = text(told.session_id);
    this.execId = text(told.id);
    this.contextId = text(told.context);
  }

  keep(shown: Result): void {
    if (this.results.length < MAX_RESULTS) this.results.push(shown);
    else this.dropped = true;
  }
}

/** A program that keeps its variables. `await using` removes it at the end of the block. */
export class Context implements AsyncDisposable {
  readonly sessionId: string;
  readonly contextId: string;
  private readonly connections: Connections;

  /** @internal */
  constructor(connections: Connections, sessionId: string, contextId: string) {
    this.connections = connections;
    this.sessionId = sessionId;
    this.contextId = contextId;
    if (!contextId) throw new InvalidRequest("the context id is empty", { hint: "createContext() makes one" });
  }

  /**
   * Runs code and waits for its end; returns its results, output and error. Calls line up: a context runs one thing
   * at a time. An aborted signal interrupts the code.
   */
  async run(code: string | Uint8Array, options: ExecutionOptions = {}): Promise<Execution> {
    const { onStdout, onStderr, onResult } = options;
    const limit = options.outputLimit ?? OUTPUT_LIMIT;
    for await (const event of this.events(code, { timeout: 30, ...options, outputLimit: limit })) {
      if (event.type === "execution") return event;
      if (event.type === "stdout") onStdout?.(event.data);
      else if (event.type === "stderr") onStderr?.(event.data);
      else onResult?.(event);
    }
    throw new GuestFailed("the code ended without saying how");
  }

  /** Runs code while iterating over its output and results; last comes the Execution. Leaving interrupts it. */
  stream(code: string | Uint8Array, options: ExecutionOptions = {}): AsyncGenerator<ExecutionEvent, void, void> {
    return this.events(code, { timeout: 300, outputLimit: 0, ...options });
  }

  /** Interrupts running code, as Ctrl-C does; returns whether it stopped within `grace` seconds. */
  async interrupt(grace = 5, options: CallOptions = {}): Promise<boolean> {
    return (await this.connections.call(this.about("interrupt_context", { grace }), options)).stopped === true;
  }

  /** Ends its program in any case, and starts a new one: the variables are gone. */
  async restart(options: CallOptions = {}): Promise<ContextInfo> {
    return info(await this.connections.call(this.about("restart_context"), options), this.sessionId);
  }

  /** Removes it, and everything that it runs. */
  async close(options: CallOptions = {}): Promise<void> {
    await this.connections.call(this.about("remove_context"), options);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    try {
      await this.close();
    } catch (error) {
      if (!(error instanceof ContextNotFound || error instanceof SessionNotFound)) throw error;
    }
  }

  private about(op: string, fields: Record<string, wire.Packable> = {}): wire.Packable {
    return { op, session: byId(this.sessionId), id: this.contextId, ...fields };
  }

  private async *events(
    code: string | Uint8Array,
    options: ExecutionOptions,
  ): AsyncGenerator<ExecutionEvent, void, void> {
    // Its language is that of the context, so the call names none.
    const call = { ...codeCall(byId(this.sessionId), code, "", { ...options, killOnDisconnect: true }), language: undefined };
    const limits = this.connections.programLimits(options);
    const { lane, told } = await this.connections.begin({ ...call, context: this.contextId }, { own: true, ...limits });
    const gathered = new Gathered(told);
    const records = new Records();
    let finished = false;
    try {
      for (;;) {
        const { kind, body } = await lane.receive();
        if (kind === wire.OUT || kind === wire.ERR) {
          const event = outputEvent(kind === wire.OUT ? "stdout" : "stderr", body);
          gathered[event.type].push(event.data);
          yield event;
          lane.consume(event.data.length);
        } else if (kind === wire.SHOW) {
          for (const shown of records.feed(body)) {
            gathered.keep(shown);
            yield shown;
          }
          lane.consume(body.length - wire.SEQ_SIZE);
        } else if (kind === wire.EXIT) {
          finished = true;
          yield new Execution(gathered, wire.unpackDict(body));
          return;
        } else {
          checkError({ kind, body });
        }
      }
    } catch (error) {
      if (isLost(error)) throw new ProgramLost(error, gathered.sessionId, gathered.execId);
      if (error instanceof wire.WireError) throw new GuestFailed(`the context answered nonsense: ${error.message}`);
      throw error;
    } finally {
      if (finished) this.connections.finish(lane);
      else this.connections.abandon(lane);
    }
  }
}

const CONTEXT: Omit<ContextInfo, "contextId" | "sessionId"> = {
  language: "",
  cwd: "",
  state: "ready",
  endedBecause: "",
  executionCount: 0,
  waiting: 0,
  pid: 0,
};

export function info(told: wire.Dict, sessionId: string): ContextInfo {
  return { contextId: text(told.id), sessionId, ...fill(CONTEXT, told) };
}

export async function create(
  connections: Connections,
  sessionId: string,
  language: ContextLanguage,
  options: CreateContextOptions,
): Promise<Context> {
  const call = {
    op: "create_context",
    session: byId(sessionId),
    id: options.contextId || undefined,
    language,
    cwd: options.cwd || undefined,
  };
  const told = await connections.call(call, options);
  return new Context(connections, text(told.session_id), text(told.id));
}

export async function list(connections: Connections, sessionId: string, options: CallOptions): Promise<ContextInfo[]> {
  const told = await connections.call({ op: "list_contexts", session: byId(sessionId) }, options);
  return dicts(told.contexts).map((item) => info(item, text(told.session_id)));
}
