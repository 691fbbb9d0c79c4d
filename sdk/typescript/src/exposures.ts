/**
 * Exposed ports: a server in a sandbox, on a URL of the gateway's machine.
 *
 * @module
 */

import { byId } from "./commands.ts";
import { type CallOptions, type Connections } from "./connections.ts";
import { FileError, TimedOut } from "./errors.ts";
import { fill } from "./records.ts";
import type { Dict } from "./wire.ts";

export const LOOPBACK = "127.0.0.1";
const TOKEN_HEADER = "x-k8e-token";
const NOBODY = new Set(["ETIMEDOUT", "ECONNREFUSED", "EADDRNOTAVAIL", "EAFNOSUPPORT"]);

const SHAPE = { url: "", port: 0, host: LOOPBACK, startedAt: 0, sessionId: "", token: "" };

/** A port of a sandbox that can be reached on the gateway's machine. */
export class Exposed {
  /** With the token, for a browser or `curl`: anyone who has it can use the service. */
  readonly url: string;
  /** The server's, in the sandbox. */
  readonly port: number;
  /** Where in the sandbox the server listens. */
  readonly host: string;
  /** Seconds since 1970. */
  readonly startedAt: number;
  readonly sessionId: string;
  readonly token: string;
  private readonly connections: Connections;

  /** @internal */
  constructor(connections: Connections, told: Dict) {
    const found = fill(SHAPE, told);
    this.connections = connections;
    this.url = found.url;
    this.port = found.port;
    this.host = found.host;
    this.startedAt = found.startedAt;
    this.sessionId = found.sessionId;
    this.token = found.token;
  }

  /** The address without the token, for a program that sends `headers`. */
  get baseUrl(): string {
    return this.url.split("?")[0] ?? "";
  }

  /** The headers that each request needs whose URL has no token. */
  get headers(): Record<string, string> {
    return { [TOKEN_HEADER]: this.token };
  }

  /**
   * Waits until the server in the sandbox accepts connections; returns itself. {@link errors.TimedOut} if it does not within
   * `timeout` seconds.
   */
  async wait(timeout = 30, options: CallOptions = {}): Promise<this> {
    await waitForPort(this.connections, this.sessionId, this.port, { host: this.host, timeout, ...options });
    return this;
  }
}

/** How long to wait for a server, and where it listens. */
export interface WaitOptions extends CallOptions {
  /** An address of the sandbox's loopback, or `localhost` for 127.0.0.1 and ::1. */
  host?: string | undefined;
  /** Seconds. */
  timeout?: number | undefined;
}

/** Waits until a server in the sandbox accepts connections; the sandbox itself watches for it. */
export async function waitForPort(
  connections: Connections,
  sessionId: string,
  port: number,
  options: WaitOptions,
): Promise<void> {
  const { host = LOOPBACK, timeout = 30 } = options;
  const call = { op: "connect", session: byId(sessionId), port, host, wait: timeout };
  try {
    const { lane } = await connections.begin(call, { signal: connections.limits(options) });
    connections.abandon(lane); // it was there; nothing is said to it
  } catch (error) {
    if (!(error instanceof FileError && NOBODY.has(error.code))) throw error;
    throw new TimedOut(`nothing listens on port ${port} of session ${sessionId} after ${timeout} s`, {
      hint: `look whether the server runs, and that it listens on ${host}: execs(sessionId), transcript(sessionId)`,
    });
  }
}
