/**
 * Many operations on one connection. What is below, a pipe, carries frames: on a unix socket, or in a
 * gRPC stream.
 *
 * Each operation is a lane: a channel of the connection. A lane keeps frames until they are taken,
 * and that is at most a window of bytes, because more is granted only for what was consumed.
 *
 * @module
 */

import { ConnectionLost, GuestFailed, type K8eError } from "./errors.ts";
import { abortError } from "./failures.ts";
import * as wire from "./wire.ts";

/** A way for frames to a gateway. */
export interface Pipe {
  /** Sends a frame. `onFailure` is called if it surely did not arrive as a whole. */
  send(kind: number, channel: number, body: Uint8Array, onFailure: () => void): void;
  /** Whether the program stays alive for it. */
  hold(needed: boolean): void;
  close(): void;
}

/** The receiver of a pipe's frames. */
export interface PipeListener {
  frame: wire.OnFrame;
  /** The end. `reset`: the other end left with something unread. */
  closed(because: K8eError | undefined, reset: boolean): void;
}

/** A frame of one operation. */
export interface Frame {
  readonly kind: number;
  readonly body: Buffer;
}

const MAX_LANES = 512; // half of what the gateway allows on one connection
const LAST_CHANNEL = 0xffff_ffff;
const CREDIT_STEP = 256 << 10; // what was consumed is told in steps, not for each frame
const EMPTY = Buffer.alloc(0);

/** One operation under way. */
export class Lane {
  readonly connection: Connection;
  readonly channel: number;
  /** Bytes that may be sent as STDIN or DATA. */
  credit = wire.WINDOW;
  /** The number of its CALL among all frames of the connection. */
  sent = 0;
  /** Gives the place of DATA that is to come, after so many bytes, so that a large file is copied once. */
  placeOf: ((at: number, length: number) => Buffer | undefined) | undefined;
  private announced = 0; // bytes of DATA whose header came
  /** Its CALL did not arrive. */
  unsent = false;
  private queue: Frame[] = [];
  private taken = 0;
  private consumed = 0;
  private over = false;
  private failure: K8eError | undefined;
  private wake: (() => void) | undefined;
  private wakeSender: (() => void) | undefined;
  private signal: AbortSignal | undefined;

  constructor(connection: Connection, channel: number) {
    this.connection = connection;
    this.channel = channel;
  }

  /** Fails when the signal is aborted; the one of before does not count any more. */
  obey(signal: AbortSignal | undefined): void {
    if (signal === this.signal) return;
    this.signal?.removeEventListener("abort", this.abort);
    this.signal = signal;
    if (signal === undefined) return;
    signal.addEventListener("abort", this.abort, { once: true });
    if (signal.aborted) this.abort();
  }

  private readonly abort = (): void => {
    this.fail(abortError(this.signal?.reason));
  };

  send(kind: number, body: Uint8Array = EMPTY): void {
    if (kind === wire.CANCEL) this.over = true;
    this.connection.send(this, kind, body);
  }

  /** The next frame if it is there already. Failures come after the frames that came before them. */
  poll(): Frame | undefined {
    const frame = this.queue[this.taken];
    if (frame === undefined) {
      if (this.failure !== undefined) throw this.failure;
      return undefined;
    }
    this.taken += 1;
    if (this.taken === this.queue.length) {
      this.queue = [];
      this.taken = 0;
    }
    return frame;
  }

  /** Waits until there is something to {@link poll}. */
  arrival(): Promise<void> {
    return new Promise((resolve) => {
      this.wake = resolve;
      if (this.taken < this.queue.length || this.failure !== undefined) this.awaken();
    });
  }

  /** The next frame. */
  async receive(): Promise<Frame> {
    for (;;) {
      const frame = this.poll();
      if (frame !== undefined) return frame;
      await this.arrival();
    }
  }

  /** Lets as many bytes come again. */
  consume(count: number): void {
    this.consumed += count;
    if (this.consumed >= CREDIT_STEP && !this.over) {
      this.send(wire.CREDIT, wire.creditBody(this.consumed));
      this.consumed = 0;
    }
  }

  /** Waits until so many bytes may be sent; false if nothing more is wanted. */
  async mayFeed(count: number): Promise<boolean> {
    while (this.credit < count && !this.over && this.failure === undefined) {
      await new Promise<void>((resolve) => {
        this.wakeSender = resolve;
      });
    }
    return !this.over && this.failure === undefined;
  }

  /** Gives up: to the gateway this is what the end of a connection is. */
  close(): void {
    if (!this.over && this.connection.open) this.send(wire.CANCEL);
    this.end();
  }

  /** Stops listening. */
  end(): void {
    this.over = true;
    this.signal?.removeEventListener("abort", this.abort);
    this.connection.forget(this);
    this.awaken();
  }

  /** Called by the connection, as the following: DATA begins to come. */
  announce(length: number): Buffer | undefined {
    const at = this.announced;
    this.announced += length;
    return this.placeOf?.(at, length);
  }

  hear(kind: number, body: Buffer): void {
    if (kind === wire.CREDIT) {
      this.credit += body.length === 4 ? body.readUInt32BE(0) : 0;
    } else {
      if (kind === wire.ERROR || kind === wire.EXIT) this.over = true;
      this.queue.push({ kind, body });
    }
    this.awaken();
  }

  fail(because: K8eError): void {
    this.failure ??= because;
    this.awaken();
  }

  private awaken(): void {
    const { wake, wakeSender } = this;
    this.wake = this.wakeSender = undefined;
    wake?.();
    wakeSender?.();
  }
}

/** A connection to a gateway. */
export class Connection implements PipeListener {
  open = true;
  private pipe: Pipe | undefined;
  private readonly lanes = new Map<number, Lane>();
  private channel = 0;
  private sent = 0;
  private last = LAST_CHANNEL; // the last channel whose CALL the gateway says it has read
  private leaving = false;
  private until = Infinity;

  /** Gives it the pipe, which tells it what comes; nothing begins on it after a date. */
  attach(pipe: Pipe, until = Infinity): this {
    this.pipe = pipe;
    this.until = until;
    pipe.hold(false);
    return this;
  }

  /** Whether one more operation may begin. */
  get usable(): boolean {
    return (
      this.open &&
      !this.leaving &&
      this.last === LAST_CHANNEL &&
      this.lanes.size < MAX_LANES &&
      this.channel < LAST_CHANNEL &&
      (this.until === Infinity || Date.now() < this.until)
    );
  }

  get idle(): boolean {
    return this.lanes.size === 0;
  }

  /** Begins an operation. */
  lane(): Lane {
    this.channel += 1;
    const lane = new Lane(this, this.channel);
    if (this.lanes.size === 0) this.pipe?.hold(true);
    this.lanes.set(lane.channel, lane);
    if (!this.open) lane.fail(new ConnectionLost("the gateway closed the connection", { unread: true }));
    return lane;
  }

  send(lane: Lane, kind: number, body: Uint8Array): void {
    if (!this.open || this.pipe === undefined) return;
    this.sent += 1;
    const isCall = kind === wire.CALL;
    if (isCall) lane.sent = this.sent;
    this.pipe.send(kind, lane.channel, body, () => {
      if (isCall) lane.unsent = true;
    });
  }

  forget(lane: Lane): void {
    if (!this.lanes.delete(lane.channel) || this.lanes.size > 0) return;
    this.pipe?.hold(false);
    if (this.leaving) this.close();
  }

  /** Closes when the last operation has ended. */
  leave(): void {
    this.leaving = true;
    if (this.lanes.size === 0) this.close();
  }

  close(): void {
    this.open = false;
    this.pipe?.close();
  }

  readonly frame = (kind: number, channel: number, body: Buffer): void => {
    const lane = this.lanes.get(channel);
    if (lane !== undefined) lane.hear(kind, body);
    else if (kind === wire.GOODBYE && body.length === 4) this.last = body.readUInt32BE(0);
    // Else it crossed with the end of the operation.
  };

  readonly placeOf = (kind: number, channel: number, length: number): Buffer | undefined =>
    kind === wire.DATA ? this.lanes.get(channel)?.announce(length) : undefined;

  readonly closed = (because: K8eError | undefined, reset: boolean): void => {
    if (!this.open) {
      for (const lane of this.lanes.values()) lane.fail(this.lost(lane, because, false));
      return;
    }
    this.open = false;
    for (const lane of [...this.lanes.values()]) lane.fail(this.lost(lane, because, reset));
    this.pipe?.close();
  };

  /**
   * What became of a call. It can be sent again only if it surely was not read: what did not go, what the
   * gateway says it left, or the last frame of all, if the kernel says that something was left.
   */
  private lost(lane: Lane, because: K8eError | undefined, reset: boolean): K8eError {
    const unread = lane.unsent || lane.channel > this.last || (reset && lane.sent === this.sent);
    if (because !== undefined && !unread) return because;
    return new ConnectionLost("the gateway closed the connection", { unread, cause: because });
  }
}

/** The error of a peer that broke the protocol. */
export function nonsense(error: unknown): K8eError {
  const why = error instanceof Error ? error.message : String(error);
  return new GuestFailed(`the gateway sent something that is not k8e's: ${why}`, {
    cause: error,
    hint: "check that the endpoint is a gateway of k8e, of a release that fits this client",
  });
}
