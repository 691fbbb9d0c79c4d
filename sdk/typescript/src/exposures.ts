/**
 * Exposed ports: a server in a sandbox, on a URL of the gateway's machine.
 *
 * @module
 */

import { byId } from "./commands.ts";
import { type CallOptions, type Connections, pause } from "./connections.ts";
import { FileError, TimedOut } from "./errors.ts";
import { fill } from "./records.ts";
import type { Dict } from "./wire.ts";

export const LOOPBACK = "127.0.0.1";
const TOKEN_HEADER = "x-k8e-token";
const FIRST_PAUSE = 20; // milliseconds between two tries to connect, and the most
const LONGEST_PAUSE = 250;

const SHAPE = { url: "", port: 0, host: LOOPBACK, startedAt: 0, sessionId: "", token: "" };

/** A port of a sandbox that can be reached on the gateway's machine. */
export class Exposed {
  /** With the token, for a browser or `curl`: whoever has it can use the service. */
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

  /** What each request needs that does not have the token in its URL. */
  get headers(): Record<string, string> {
    return { [TOKEN_HEADER]: this.token };
  }

  /**
   * Waits until the server in the sandbox takes connections; itself. {@link errors.TimedOut} if it does not within
   * `timeout` seconds.
   */
  async wait(timeout = 30, options: CallOptions = {}): Promise<this> {
    const until = performance.now() + timeout * 1000;
    for (let delay = FIRST_PAUSE; !(await this.isListening(options)); delay = Math.min(2 * delay, LONGEST_PAUSE)) {
      if (performance.now() + delay > until) {
        throw new TimedOut(`nothing listens on port ${this.port} of session ${this.sessionId} after ${timeout} s`, {
          hint: `look whether the server runs, and that it listens on ${this.host}: execs(sessionId), transcript(sessionId)`,
        });
      }
      await pause(delay, options.signal);
    }
    return this;
  }

  private async isListening(options: CallOptions): Promise<boolean> {
    const hosts = this.host === "localhost" ? ["127.0.0.1", "::1"] : [this.host];
    for (const host of hosts) {
      const call = { op: "connect", session: byId(this.sessionId), port: this.port, host };
      try {
        const { lane } = await this.connections.begin(call, { signal: this.connections.limits(options) });
        lane.close();
        return true;
      } catch (error) {
        if (!(error instanceof FileError)) throw error;
      }
    }
    return false;
  }
}
