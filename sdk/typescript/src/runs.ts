/**
 * Programs that run on without their caller, and the output of all programs of a session.
 *
 * @module
 */

import { Collected, joined, runCall, runId, splitRunId } from "./commands.ts";
import { type CallOptions, checkError, type Connections, isLost, pause, RETRY_DELAYS } from "./connections.ts";
import { number, text } from "./records.ts";
import {
  type ExecEvent,
  type ExecResult,
  exitCode,
  exitEvent,
  Output,
  outputEvent,
  type RunState,
  type Status,
} from "./results.ts";
import * as wire from "./wire.ts";

/** Where to read from, and whether to wait for more. */
export interface OutputOptions extends CallOptions {
  /** The byte to begin with, counted over both streams. */
  start?: number | undefined;
  /** Wait for further output; otherwise only the output so far. */
  follow?: boolean | undefined;
}

/** Attaches to output that is numbered, and emits it; last an exit, if it has ended. */
export async function* attach(
  connections: Connections,
  call: Record<string, wire.Packable>,
  options: CallOptions & { follow: boolean },
): AsyncGenerator<ExecEvent, void, void> {
  const { lane, told } = await connections.begin(call, { own: true, ...connections.streamLimits(options) });
  const sessionId = text(told.session_id);
  const execId = text(told.id);
  const end = options.follow || told.code !== null ? Infinity : number(told.seq);
  let at = typeof call.seq === "number" ? call.seq : 0;
  let finished = false;
  try {
    while (at < end) {
      const frame = await lane.receive();
      if (frame.kind === wire.OUT || frame.kind === wire.ERR) {
        const event = outputEvent(frame.kind === wire.OUT ? "stdout" : "stderr", frame.body);
        at = event.seq + event.data.length;
        lane.consume(event.data.length);
        yield event;
      } else if (frame.kind === wire.SHOW) {
        at = wire.sequence(frame.body) + frame.body.length - wire.SEQ_SIZE;
        lane.consume(frame.body.length - wire.SEQ_SIZE);
      } else if (frame.kind === wire.EXIT) {
        finished = true;
        yield exitEvent(wire.unpackDict(frame.body), sessionId, execId);
        return;
      } else {
        checkError(frame);
      }
    }
  } finally {
    if (finished) connections.finish(lane);
    else connections.abandon(lane);
  }
}

/** The same, asking again where a gateway went away: bytes have numbers, so none comes twice. */
export async function* followed(
  connections: Connections,
  call: Record<string, wire.Packable>,
  options: OutputOptions,
): AsyncGenerator<ExecEvent, void, void> {
  let at = options.start ?? 0;
  const { follow = true, signal, requestTimeout } = options;
  for (let failures = 0; ; failures += 1) {
    try {
      for await (const event of attach(connections, { ...call, seq: at }, { follow, signal, requestTimeout })) {
        if (event.type !== "exit") at = event.seq + event.data.length;
        failures = 0;
        yield event;
      }
      return;
    } catch (error) {
      const delay = RETRY_DELAYS[failures];
      if (!isLost(error) || delay === undefined) throw error;
      await pause(delay, signal);
    }
  }
}

/** A program that runs on without us. Made by `start` and `getRun`. */
export class Run {
  /** Names the run, also for other programs and on the command line. */
  readonly runId: string;
  readonly sessionId: string;
  readonly execId: string;
  private readonly connections: Connections;

  /** @internal */
  constructor(connections: Connections, id: string) {
    this.connections = connections;
    this.runId = id;
    [this.sessionId, this.execId] = splitRunId(id);
  }

  /** Its state, and its output so far. Does not wait for its end. */
  async poll(options: CallOptions = {}): Promise<RunState> {
    const signal = this.connections.limits(options);
    const { lane, told } = await this.connections.begin(runCall("attach", this.runId), { own: true, signal });
    const streams: Record<"stdout" | "stderr", Uint8Array[]> = { stdout: [], stderr: [] };
    let described = told;
    let at = 0;
    let lost = false;
    let finished = false;
    try {
      // That is less than a window, so no credit is given: a guest that sends more fills no memory.
      while (told.code !== null || at < number(told.seq)) {
        const frame = await lane.receive();
        if (frame.kind === wire.EXIT) {
          described = { ...told, ...wire.unpackDict(frame.body) };
          finished = true;
          break;
        }
        if (frame.kind === wire.OUT || frame.kind === wire.ERR) {
          const event = outputEvent(frame.kind === wire.OUT ? "stdout" : "stderr", frame.body);
          lost ||= event.seq > at;
          at = event.seq + event.data.length;
          streams[event.type].push(event.data);
        } else if (frame.kind === wire.SHOW) {
          at = wire.sequence(frame.body) + frame.body.length - wire.SEQ_SIZE;
        } else {
          checkError(frame);
        }
      }
    } finally {
      if (finished) this.connections.finish(lane);
      else this.connections.abandon(lane);
    }
    const output = new Output(joined(streams.stdout), joined(streams.stderr));
    return {
      runId: this.runId,
      sessionId: this.sessionId,
      execId: this.execId,
      status: text(described.status) as Status | "running",
      exitCode: exitCode(described.code),
      durationMs: number(described.duration_ms),
      stdout: output.stdout,
      stderr: output.stderr,
      stdoutBytes: output.stdoutBytes,
      stderrBytes: output.stderrBytes,
      truncated: lost || described.truncated === true,
    };
  }

  /**
   * Iterates over its output from byte `start` and, last, its exit. Leaving the loop does not disturb it. A
   * gateway that restarts meanwhile is asked again.
   */
  output(options: OutputOptions = {}): AsyncGenerator<ExecEvent, void, void> {
    return followed(this.connections, runCall("attach", this.runId), options);
  }

  /** Waits for its end; returns the result, and the output that is still kept. */
  async wait(options: CallOptions = {}): Promise<ExecResult> {
    const collected = new Collected();
    for await (const event of this.output(this.connections.programLimits(options))) collected.add(event);
    return collected.result();
  }

  /** Ends it and everything that it started; nothing happens if it has ended. */
  async kill(options: CallOptions = {}): Promise<void> {
    await this.connections.call(runCall("signal", this.runId, { terminate: true }), options);
  }

  /** Sends a signal to its process group. */
  async signal(number: number, options: CallOptions = {}): Promise<void> {
    await this.connections.call(runCall("signal", this.runId, { signal: number }), options);
  }
}

/** Starts a program in the background. */
export async function start(
  connections: Connections,
  call: Record<string, wire.Packable>,
  options: CallOptions,
): Promise<Run> {
  const { lane, told } = await connections.begin(call, { signal: connections.limits(options) });
  lane.close();
  return new Run(connections, runId(text(told.session_id), text(told.id)));
}

