/**
 * Interactive programs.
 *
 * Output is kept until it is read. So a program that is written to and read from in turns never blocks,
 * and one whose output is not read is stopped after a window of it.
 *
 * @module
 */

import { type ExecCall, joined, runCall, runId, splitRunId } from "./commands.ts";
import type { Lane } from "./connection.ts";
import { type CallOptions, checkError, type Connections, isLost } from "./connections.ts";
import { bytesOf, cut, type Piece } from "./content.ts";
import { ClientClosed, ExecNotFound, K8eError, LimitExceeded, ProgramLost } from "./errors.ts";
import { unlessAborted } from "./failures.ts";
import {
  type ExecEvent,
  ExecResult,
  type Exit,
  exitEvent,
  type Foreground,
  foreground,
  outputEvent,
  type Stderr,
  type Stdout,
} from "./results.ts";
import * as wire from "./wire.ts";

/** Bytes of output that are kept while something else is waited for. */
const MOST_KEPT = 64 << 20;
const CLOSE_MILLISECONDS = 10_000;

/** The input of a program was closed, or the program has ended. */
export class InputClosed extends K8eError {
  override readonly code: string = "EPIPE";
  override name = "InputClosed";
}

/** A program's output ended before the expected output came. */
export class OutputEnded extends K8eError {
  override readonly code: string = "output_ended";
  override name = "OutputEnded";
}

/** A program that runs, to be written to and read from. Made by `open` and `terminal`; `close` kills it. */
export class Process implements AsyncIterable<ExecEvent>, AsyncDisposable {
  /** Names the run, also for other programs and on the command line. */
  readonly runId: string;
  readonly sessionId: string;
  readonly execId: string;
  private readonly connections: Connections;
  private readonly lane: Lane;
  private readonly queues: { stdout: Stdout[]; stderr: Stderr[] } = { stdout: [], stderr: [] };
  private kept = 0;
  private exit: Exit | undefined;
  private exitTold = false;
  private failure: unknown;
  private result: ExecResult | undefined;
  private receiving: Promise<void> | undefined;
  private writing: Promise<void> = Promise.resolve();
  private inputOpen: boolean;
  private readonly isTerminal: boolean;

  private readonly onEnd: (self: Process) => void;

  /** @internal */
  constructor(connections: Connections, lane: Lane, call: ExecCall, onEnd: (self: Process) => void) {
    this.connections = connections;
    this.lane = lane;
    this.onEnd = onEnd;
    const { session } = call;
    this.runId = runId(typeof session.id === "string" ? session.id : "", call.id);
    [this.sessionId, this.execId] = splitRunId(this.runId);
    this.isTerminal = call.tty !== undefined;
    this.inputOpen = call.stdin === true || this.isTerminal;
  }

  /** @internal */
  static async open(
    connections: Connections,
    call: ExecCall,
    options: CallOptions & { onEnd: (self: Process) => void },
  ): Promise<Process> {
    const { lane } = await connections.begin(call, { own: true, ...connections.streamLimits(options) });
    return new Process(connections, lane, call, options.onEnd);
  }

  // Writing.

  /**
   * Sends input, after what was written before. Waits while the program lags a MiB behind. What was sent before an
   * abort is with the program.
   */
  write(data: Piece, options: CallOptions = {}): Promise<void> {
    const signal = this.waiting(options);
    const done = this.writing.then(() => this.send(bytesOf(data), signal));
    this.writing = done.catch(() => undefined);
    return done;
  }

  private async send(bytes: Uint8Array, signal: AbortSignal | undefined): Promise<void> {
    if (!this.inputOpen) throw new InputClosed("the input of this program is closed", { hint: "open it again with stdin" });
    for (const part of cut(bytes)) {
      while (this.lane.credit < part.length && !this.over) {
        await unlessAborted(Promise.race([this.lane.mayFeed(part.length), this.more()]), signal);
      }
      if (this.exit !== undefined) throw new InputClosed("the program has ended", { hint: "wait() tells how" });
      this.checkFailure();
      this.lane.credit -= part.length;
      this.lane.send(wire.STDIN, part);
    }
  }

  /** Lets the program see the end of its input; on a terminal this is Ctrl-D. */
  async closeStdin(): Promise<void> {
    await this.writing;
    if (this.inputOpen && !this.over) this.lane.send(wire.STDIN_END);
    this.inputOpen = this.isTerminal; // there it is a key, and no end
  }

  // Reading.

  /** Iterates over its output and, last, its exit. Leaving the loop does not disturb it. */
  async *[Symbol.asyncIterator](): AsyncGenerator<ExecEvent, void, void> {
    for (;;) {
      const { stdout, stderr } = this.queues;
      const [out, err] = [stdout[0], stderr[0]];
      if (out !== undefined && (err === undefined || out.seq < err.seq)) yield this.take("stdout");
      else if (err !== undefined) yield this.take("stderr");
      else if (this.exit !== undefined) {
        if (!this.exitTold) {
          this.exitTold = true;
          yield this.exit;
        }
        return;
      } else await this.more();
    }
  }

  // A call that is aborted, or whose `requestTimeout` is over, loses nothing of what came.

  /** At most `count` bytes of stdout, as soon as there are any; empty at the end. Without `count`, all of it. */
  async read(count = -1, options: CallOptions = {}): Promise<Uint8Array> {
    const signal = this.waiting(options);
    const found: Stdout[] = [];
    try {
      while (count !== 0) {
        const first = this.queues.stdout[0];
        if (first !== undefined) {
          this.take("stdout");
          if (count >= 0) {
            this.putBack({ type: "stdout", data: first.data.subarray(count), seq: first.seq + count });
            return first.data.subarray(0, count);
          }
          found.push(first);
        } else if (this.exit !== undefined) break;
        else await this.more(signal);
      }
    } catch (error) {
      for (const event of found.reverse()) this.putBack(event);
      throw error;
    }
    return joined(found.map((event) => event.data));
  }

  /** Stdout up to and with `marker`; {@link OutputEnded} if the program ends without printing it. */
  async readUntil(marker: Piece, options: CallOptions = {}): Promise<Uint8Array> {
    const signal = this.waiting(options);
    const wanted = Buffer.from(bytesOf(marker));
    if (wanted.length === 0) throw new RangeError("the marker is empty");
    let found = Buffer.alloc(0);
    let seq = -1;
    try {
      for (;;) {
        while (this.queues.stdout.length === 0) {
          if (this.exit !== undefined) {
            throw new OutputEnded(`the program ended before it printed ${JSON.stringify(wanted.toString())}`, {
              hint: "read() gives what it printed instead, wait() tells how it ended",
            });
          }
          await this.more(signal);
        }
        const event = this.take("stdout");
        seq = seq < 0 ? event.seq : seq;
        const searched = Math.max(0, found.length - wanted.length + 1);
        found = Buffer.concat([found, event.data]);
        const at = found.indexOf(wanted, searched);
        if (at >= 0) {
          const done = found.subarray(0, at + wanted.length);
          seq += done.length;
          found = found.subarray(done.length);
          return done;
        }
      }
    } finally {
      if (found.length > 0) this.putBack({ type: "stdout", data: found, seq }); // what came is not lost
    }
  }

  /** Waits for its end; returns the result, with the output that was not read before. */
  async wait(options: CallOptions = {}): Promise<ExecResult> {
    const signal = this.waiting(options);
    while (this.exit === undefined) await this.more(signal);
    if (this.result === undefined) {
      const { stdout, stderr } = this.queues;
      this.result = new ExecResult(this.exit, joined(stdout.map((one) => one.data)), joined(stderr.map((one) => one.data)));
      this.clear();
      this.exitTold = true;
    }
    return this.result;
  }

  // Control.

  /** Gives its terminal another size. */
  async resize(rows: number, columns: number, options: CallOptions = {}): Promise<void> {
    await this.connections.call(runCall("resize", this.runId, { rows, cols: columns }), options);
  }

  /** Sends a signal to its process group, or to the foreground group of its terminal. */
  async signal(number: number, options: CallOptions & { foreground?: boolean } = {}): Promise<void> {
    const call = runCall("signal", this.runId, { signal: number, foreground: options.foreground ?? false });
    await this.connections.call(call, options);
  }

  /** The foreground process group of its terminal, and whether that waits for input. */
  async foreground(options: CallOptions = {}): Promise<Foreground> {
    return foreground(await this.connections.call(runCall("foreground", this.runId), options));
  }

  /** Ends it and everything that it started; nothing happens if it has ended. */
  async kill(options: CallOptions = {}): Promise<void> {
    try {
      await this.connections.call(runCall("signal", this.runId, { terminate: true }), options);
    } catch (error) {
      if (!(error instanceof ExecNotFound)) throw error;
    }
  }

  /** Kills it if it runs, and waits for its end. */
  async close(): Promise<void> {
    if (this.over) return;
    try {
      await this.kill({ signal: AbortSignal.timeout(CLOSE_MILLISECONDS) });
      await this.drain();
    } catch (error) {
      this.connections.abandon(this.lane);
      if (!(error instanceof K8eError)) throw error;
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  // What comes.

  private get over(): boolean {
    return this.exit !== undefined || this.failure !== undefined;
  }

  private take(type: "stdout"): Stdout;
  private take(type: "stderr"): Stderr;
  private take(type: "stdout" | "stderr"): Stdout | Stderr {
    const event = this.queues[type].shift();
    if (event === undefined) throw new RangeError("nothing is there");
    this.kept -= event.data.length;
    return event;
  }

  private putBack(event: Stdout): void {
    if (event.data.length === 0) return;
    this.queues.stdout.unshift(event);
    this.kept += event.data.length;
  }

  private async drain(): Promise<void> {
    while (!this.over) {
      this.clear();
      await this.more();
    }
  }

  private clear(): void {
    this.queues.stdout = [];
    this.queues.stderr = [];
    this.kept = 0;
  }

  /** What ends a wait for the program, which may take as long as it likes: not the client's own time-out. */
  private waiting(options: CallOptions): AbortSignal | undefined {
    return this.connections.programLimits(options).signal;
  }

  /** Waits for a frame. Several may wait; one takes it in for all. */
  private async more(signal?: AbortSignal): Promise<void> {
    if (this.connections.closed) throw new ClientClosed();
    this.checkFailure();
    if (this.exit !== undefined) return;
    if (this.kept >= MOST_KEPT) {
      throw new LimitExceeded(`${this.kept} bytes of output wait to be read`, { hint: "read them between writes" });
    }
    this.receiving ??= this.receive().finally(() => {
      this.receiving = undefined;
    });
    await unlessAborted(this.receiving, signal);
    this.checkFailure();
  }

  private checkFailure(): void {
    if (this.failure !== undefined) throw this.failure;
  }

  private async receive(): Promise<void> {
    try {
      const { kind, body } = await this.lane.receive();
      if (kind === wire.OUT || kind === wire.ERR) {
        const event = outputEvent(kind === wire.OUT ? "stdout" : "stderr", body);
        if (event.type === "stdout") this.queues.stdout.push(event);
        else this.queues.stderr.push(event);
        this.kept += event.data.length;
        this.lane.consume(event.data.length);
      } else if (kind === wire.EXIT) {
        this.exit = exitEvent(wire.unpackDict(body), this.sessionId, this.execId);
        this.connections.finish(this.lane);
        this.onEnd(this);
      } else {
        checkError({ kind, body });
      }
    } catch (error) {
      this.failure = isLost(error) ? new ProgramLost(error, this.sessionId, this.execId) : error;
      this.connections.abandon(this.lane);
      this.onEnd(this);
    }
  }
}
