/**
 * The connections of one client: one that all calls share, and others for what is streamed or fed.
 *
 * @module
 */

import { startLocalGateway } from "./autostart.ts";
import type { Connection, Frame, Lane } from "./connection.ts";
import type { Endpoint } from "./endpoints.ts";
import {
  ClientClosed,
  ConnectionLost,
  GatewayUnreachable,
  InvalidRequest,
  type K8eError,
  LimitExceeded,
} from "./errors.ts";
import { abortError, checkSignal, fromWire, unlessAborted } from "./failures.ts";
import * as local from "./local.ts";
import type { Dict, Packable } from "./wire.ts";
import * as wire from "./wire.ts";

/** How long a call may take, and a signal that ends it. */
export interface CallOptions {
  /** Ends the call with {@link errors.Aborted}; a program that it runs is killed. */
  signal?: AbortSignal | undefined;
  /** Seconds after which a call fails that the gateway has not answered; 0 means never. */
  requestTimeout?: number | undefined;
}

/** An operation that the gateway has begun, and its first answer. */
export interface Begun {
  readonly lane: Lane;
  readonly told: Dict;
}

/** What ends an operation: until the gateway has answered, and afterwards. */
export interface Limits {
  readonly signal: AbortSignal | undefined;
  readonly starting: AbortSignal | undefined;
}

/** Opens connections to one endpoint. */
interface Connector {
  connect(): Promise<Connection>;
  close(): void;
}

const MAX_IDLE = 32;
/** Milliseconds before each new try to reach a gateway that went away; the first may meet a dying one. */
export const RETRY_DELAYS: readonly number[] = [0, 100, 500];

class LocalConnector implements Connector {
  private path: string;
  private readonly isNamed: boolean;

  constructor(path: string) {
    this.isNamed = path !== "";
    this.path = path || local.defaultSocket();
  }

  async connect(): Promise<Connection> {
    try {
      return await local.connect(this.path);
    } catch (error) {
      if (!(error instanceof local.NobodyListens)) throw error;
      if (this.isNamed) throw local.nobodyListens(this.path);
    }
    this.path = await startLocalGateway();
    try {
      return await local.connect(this.path);
    } catch (error) {
      throw error instanceof local.NobodyListens ? local.nobodyListens(this.path) : error;
    }
  }

  close(): void {
    // Nothing is shared among local connections.
  }
}

/** Finds out where the gateway is when it is first needed: that may be in files. */
class LazyConnector implements Connector {
  private readonly endpoint: () => Promise<Endpoint>;
  private found: Promise<Connector> | undefined;

  constructor(endpoint: () => Promise<Endpoint>) {
    this.endpoint = endpoint;
  }

  async connect(): Promise<Connection> {
    this.found ??= this.find();
    try {
      return await (await this.found).connect();
    } catch (error) {
      if (error instanceof InvalidRequest) this.found = undefined;
      throw error;
    }
  }

  private async find(): Promise<Connector> {
    const endpoint = await this.endpoint();
    if (!endpoint.target) return new LocalConnector(endpoint.socket);
    // HTTP/2 and messages are loaded when they are needed.
    return new (await import("./remote.ts")).Channel(endpoint);
  }

  close(): void {
    this.found?.then(
      (found) => {
        found.close();
      },
      () => undefined,
    );
  }
}

/** Connections to one gateway. */
export class Connections {
  closed = false;
  /** Reports the `warning` of an answer: a weaker runtime than usual is never silent. */
  onWarning: (text: string) => void = (text) => {
    process.emitWarning(text, "K8eWarning");
  };
  private readonly connector: Connector;
  private shared: Connection | undefined;
  private connecting: Promise<Connection> | undefined;
  private idle: Connection[] = [];
  private readonly requestTimeout: number;

  constructor(endpoint: () => Promise<Endpoint>, requestTimeout = 0) {
    this.connector = new LazyConnector(endpoint);
    this.requestTimeout = requestTimeout;
  }

  /** An operation's lane on the connection that all share. */
  private async share(): Promise<Lane> {
    if (this.shared?.usable !== true) {
      this.shared?.leave();
      this.shared = undefined;
      this.connecting ??= this.connector.connect().finally(() => {
        this.connecting = undefined;
      });
      const made = await this.connecting;
      if (this.closed) {
        made.leave();
        throw new ClientClosed();
      }
      this.shared ??= made;
    }
    return this.shared.lane();
  }

  /** A lane on a connection of its own. */
  private async own(): Promise<Lane> {
    let found: Connection | undefined;
    do found = this.idle.pop();
    while (found !== undefined && !found.usable);
    const connection = found ?? (await this.connector.connect());
    if (this.closed) {
      connection.leave();
      throw new ClientClosed();
    }
    return connection.lane();
  }

  /** A lane, unless the signal is aborted while a gateway is looked for, started or connected to. */
  private async lane(own: boolean, signal: AbortSignal | undefined): Promise<Lane> {
    const wanted = own ? this.own() : this.share();
    try {
      return await unlessAborted(wanted, signal);
    } catch (error) {
      void wanted.then(
        (lane) => {
          this.finish(lane); // it came too late
        },
        () => undefined,
      );
      throw error;
    }
  }

  /** Takes back the lane of an operation that has ended well. */
  finish(lane: Lane): void {
    lane.end();
    const { connection } = lane;
    if (connection === this.shared || !connection.open) return;
    if (!this.closed && connection.idle && connection.usable && this.idle.length < MAX_IDLE) this.idle.push(connection);
    else connection.leave();
  }

  /** Gives up an operation. */
  abandon(lane: Lane): void {
    lane.close();
    if (lane.connection !== this.shared) lane.connection.leave();
  }

  /** The signal of a call, which its time-out aborts too. */
  limits(options: CallOptions | undefined): AbortSignal | undefined {
    const seconds = options?.requestTimeout ?? this.requestTimeout;
    const signal = options?.signal;
    if (!(seconds > 0)) return signal;
    const timer = AbortSignal.timeout(Math.min(seconds * 1000, 2 ** 31 - 1));
    return signal === undefined ? timer : AbortSignal.any([signal, timer]);
  }

  /** The same for a program, which may run for long: the client's own time-out is for its start alone. */
  programLimits(options: CallOptions): Limits {
    const signal = this.limits({ signal: options.signal, requestTimeout: options.requestTimeout ?? 0 });
    return { signal, starting: options.requestTimeout === undefined ? this.limits(options) : signal };
  }

  /** The same for what is listened to: every time-out is for its start alone. */
  streamLimits(options: CallOptions): Limits {
    return { signal: options.signal, starting: this.limits(options) };
  }

  /**
   * Begins an operation, and waits for the gateway's first answer. A call is sent again only if
   * no gateway can have read it.
   */
  async begin(
    call: Packable,
    options: Partial<Limits> & { own?: boolean; onData?: (told: Dict) => void } = {},
  ): Promise<Begun> {
    const { signal, own, onData, starting = signal } = options;
    checkSignal(signal);
    const body = wire.pack(call);
    if (body.length > wire.MAX_REQUEST) {
      throw new LimitExceeded(
        `the call has ${body.length} bytes; the limit is ${wire.MAX_REQUEST}`,
        { hint: "write what is large to a file in the sandbox" },
      );
    }
    for (const delay of [...RETRY_DELAYS, undefined]) {
      if (this.closed) throw new ClientClosed();
      if (starting?.aborted === true) throw abortError(starting.reason);
      const lane = await this.lane(own === true, starting);
      try {
        lane.obey(starting);
        lane.send(wire.CALL, body);
        const told = await this.first(lane, onData);
        lane.obey(signal);
        return { lane, told };
      } catch (error) {
        this.abandon(lane);
        if (!(error instanceof ConnectionLost && error.unread) || delay === undefined) throw error;
      }
      await pause(delay, starting);
    }
    throw new GatewayUnreachable("unreachable");
  }

  private async first(lane: Lane, onData: ((told: Dict) => void) | undefined): Promise<Dict> {
    for (;;) {
      const frame = lane.poll();
      if (frame === undefined) {
        await lane.arrival();
      } else if (frame.kind === wire.DATA && onData !== undefined) {
        onData(wire.unpackDict(frame.body));
      } else if (frame.kind === wire.RESULT) {
        return this.result(frame);
      } else {
        checkError(frame);
      }
    }
  }

  private result(frame: Frame): Dict {
    const told = wire.unpackDict(frame.body, frame.body.length); // a gateway may list thousands of sessions
    if (typeof told.warning === "string" && told.warning !== "" && !("runtimes" in told)) this.onWarning(told.warning);
    return told;
  }

  /** Asks, and gets the answer. */
  async call(fields: Packable, options?: CallOptions, onData?: (told: Dict) => void): Promise<Dict> {
    const begun = await this.begin(fields, { signal: this.limits(options), ...(onData && { onData }) });
    this.finish(begun.lane);
    return begun.told;
  }

  /** Closes idle connections, and each other one when its operation has ended. */
  close(): void {
    this.closed = true;
    for (const connection of this.idle) connection.leave();
    this.idle = [];
    this.shared?.leave();
    this.shared = undefined;
    this.connector.close();
  }
}

/** Raises the error of an ERROR. */
export function checkError(frame: Frame): void {
  if (frame.kind === wire.ERROR) throw fromWire(wire.unpackDict(frame.body));
}

/** Waits, unless the signal is aborted. */
export function pause(milliseconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const aborted = (): void => {
      clearTimeout(timer);
      reject(abortError(signal?.reason));
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", aborted);
      resolve();
    }, milliseconds);
    if (signal?.aborted === true) aborted();
    else signal?.addEventListener("abort", aborted, { once: true });
  });
}

/** Whether an error means that the gateway went away. */
export function isLost(error: unknown): error is K8eError {
  return error instanceof GatewayUnreachable;
}
