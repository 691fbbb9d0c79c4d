/**
 * Remote gateways: the same frames, in the bidirectional gRPC call `Run`, over TLS.
 *
 * Of gRPC that is one method, whose messages are frames; Node's own HTTP/2 carries it.
 *
 * @module
 */

import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import { type ClientHttp2Session, type ClientHttp2Stream, constants } from "node:http2";

import { Connection, nonsense, type Pipe } from "./connection.ts";
import * as credentials from "./credentials.ts";
import type { Endpoint } from "./endpoints.ts";
import { ConnectionLost, InvalidRequest, type K8eError } from "./errors.ts";
import { type RunFrame, RunFrameSchema } from "./generated/sandbox_pb.ts";
import { dial, ended, headersOf, KEY_HINT, MAX_MESSAGE, message, PREFIX, REACH_HINT, statusOf } from "./grpc.ts";
import * as renewal from "./renewal.ts";

const RUN = "/sandbox.v1.SandboxService/Run";
/** After which a stream is not used again, and certificates are looked at: they may be new ones. */
const FRESH_MILLISECONDS = 3_600_000;

/** HTTP/2 towards one endpoint, over which its connections go. */
export class Channel {
  private readonly endpoint: Endpoint;
  private found: credentials.Credentials | undefined;
  private until = 0;
  private session: Promise<ClientHttp2Session> | undefined;

  constructor(endpoint: Endpoint) {
    this.endpoint = endpoint;
    if (!/^[\x20-\x7e]*$/.test(endpoint.apiKey)) {
      throw new InvalidRequest("the API key has characters that no key has", { hint: KEY_HINT });
    }
  }

  /** A new `Run` call. */
  async connect(): Promise<Connection> {
    const session = await this.usable();
    const stream = session.request(headersOf(this.endpoint, RUN));
    const connection = new Connection();
    const until = Date.now() + FRESH_MILLISECONDS;
    return connection.attach(new StreamPipe(session, stream, connection, this.endpoint), until);
  }

  close(): void {
    void this.session?.then(
      (session) => {
        session.close();
      },
      () => undefined,
    );
    this.session = undefined;
  }

  /** The HTTP/2 session, or another one where it has ended or certificates were renewed. */
  private async usable(): Promise<ClientHttp2Session> {
    const now = Date.now();
    if (this.session === undefined || now >= this.until) {
      this.until = now + FRESH_MILLISECONDS;
      void renewal.begin(this.endpoint);
      const found = await this.load();
      if (this.session === undefined || !same(found, this.found)) {
        this.close(); // what goes on there comes to its end
        this.found = found;
        this.session = dial(this.endpoint, found);
      }
    }
    const dialled = this.session;
    let session: ClientHttp2Session;
    try {
      session = await dialled;
    } catch (error) {
      if (this.session === dialled) this.session = undefined;
      throw error;
    }
    if (!session.closed && !session.destroyed) return session;
    if (this.session === dialled) this.session = undefined;
    return this.usable();
  }

  private async load(): Promise<credentials.Credentials> {
    try {
      return await credentials.load(this.endpoint);
    } catch (error) {
      if (this.session === undefined || this.found === undefined) throw error;
      return this.found; // what we have goes on
    }
  }
}

function same(one: credentials.Credentials, other: credentials.Credentials | undefined): boolean {
  const equal = (a: Buffer | undefined, b: Buffer | undefined): boolean => a === b || (a !== undefined && b?.equals(a) === true);
  return other !== undefined && equal(one.ca, other.ca) && equal(one.certificate, other.certificate) && equal(one.key, other.key);
}

class StreamPipe implements Pipe {
  private readonly session: ClientHttp2Session;
  private readonly stream: ClientHttp2Stream;
  private readonly connection: Connection;
  private pending: Buffer[] = [];
  private pendingLength = 0;
  private corked = false;
  private held = true;

  constructor(session: ClientHttp2Session, stream: ClientHttp2Stream, connection: Connection, endpoint: Endpoint) {
    this.session = session;
    this.stream = stream;
    this.connection = connection;
    uses(session, 1);
    const told = statusOf(stream);
    stream.on("data", (data: Buffer) => {
      this.take(data);
    });
    stream.on("close", () => {
      if (this.held) uses(session, -1);
      this.held = false;
      const because = ended(endpoint, told);
      connection.closed(because ?? (told.failure && lost(endpoint, told.failure)), false);
    });
  }

  private take(data: Buffer): void {
    this.pending.push(data);
    this.pendingLength += data.length;
    try {
      this.messages();
    } catch (error) {
      this.connection.closed(nonsense(error), false);
    }
  }

  /** Passes on the frames of all complete messages. */
  private messages(): void {
    while (this.pendingLength >= PREFIX) {
      if ((this.pending[0]?.length ?? 0) < PREFIX) this.pending = [Buffer.concat(this.pending)];
      const head = this.pending[0] ?? Buffer.alloc(0);
      const length = head.readUInt32BE(1);
      if (head[0] !== 0 || length > MAX_MESSAGE) throw new Error("a message that is compressed, or too large");
      if (this.pendingLength < PREFIX + length) return;
      const all = this.pending.length === 1 ? head : Buffer.concat(this.pending);
      this.tell(fromBinary(RunFrameSchema, all.subarray(PREFIX, PREFIX + length)));
      const rest = all.subarray(PREFIX + length);
      this.pending = rest.length > 0 ? [rest] : [];
      this.pendingLength = rest.length;
    }
  }

  private tell(message: RunFrame): void {
    for (const { kind, channel, body } of [message, ...message.rest]) {
      this.connection.frame(kind, channel, Buffer.from(body.buffer, body.byteOffset, body.byteLength));
    }
  }

  send(kind: number, channel: number, body: Uint8Array, onFailure: () => void): void {
    const { stream } = this;
    if (stream.destroyed || stream.closed) {
      onFailure();
      return;
    }
    if (!this.corked) {
      this.corked = true;
      stream.cork();
      process.nextTick(this.uncork);
    }
    const [prefix, content] = message(toBinary(RunFrameSchema, create(RunFrameSchema, { kind, channel, body: body })));
    stream.write(prefix);
    stream.write(content);
  }

  private readonly uncork = (): void => {
    this.corked = false;
    this.stream.uncork();
  };

  hold(needed: boolean): void {
    if (needed === this.held) return;
    this.held = needed;
    uses(this.session, needed ? 1 : -1);
  }

  close(): void {
    if (!this.stream.destroyed) this.stream.close(constants.NGHTTP2_CANCEL);
  }
}

function lost(endpoint: Endpoint, failure: Error): K8eError {
  return new ConnectionLost(`the gateway at ${endpoint.target} closed the connection: ${failure.message}`, {
    cause: failure,
    hint: REACH_HINT,
  });
}

const counts = new WeakMap<ClientHttp2Session, number>();

/** Counts what needs a session; the program stays alive for those that are needed. */
function uses(session: ClientHttp2Session, change: number): void {
  const count = (counts.get(session) ?? 0) + change;
  counts.set(session, count);
  if (session.destroyed) return;
  if (count > 0) session.ref();
  else session.unref();
}
