/**
 * Gateways elsewhere: the same frames, in the bidirectional gRPC call `Run`, over TLS.
 *
 * Of gRPC that is one method, whose messages are frames; Node's own HTTP/2 carries it.
 *
 * @module
 */

import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import { type ClientHttp2Session, type ClientHttp2Stream, connect, constants } from "node:http2";
import type { SecureClientSessionOptions } from "node:http2";

import { Connection, nonsense, type Pipe } from "./connection.ts";
import * as credentials from "./credentials.ts";
import type { Endpoint } from "./endpoints.ts";
import {
  ConnectionLost,
  GatewayUnreachable,
  InvalidRequest,
  type K8eError,
  KeyRefused,
  LimitExceeded,
  NotImplementedYet,
  UntrustedGateway,
} from "./errors.ts";
import { type RunFrame, RunFrameSchema } from "./generated/sandbox_pb.ts";

const RUN = "/sandbox.v1.SandboxService/Run";
const MAX_MESSAGE = 64 << 20;
const STREAM_WINDOW = 8 << 20;
const SESSION_WINDOW = 32 << 20;
const CONNECT_MILLISECONDS = 20_000;
const PING_MILLISECONDS = 90_000;
const PONG_MILLISECONDS = 20_000;
/** After which certificates are looked at: they may be new ones. */
const FRESH_MILLISECONDS = 3_600_000;
const KEY_HINT =
  "k8e sandbox api-key create NAME on the gateway's machine makes a key; pass it as apiKey or K8E_SANDBOX_APIKEY";
const TRUST_HINT =
  "check that its CA is known here: K8E_SANDBOX_CERT names its ca.crt, k8e sandbox login --ca-fingerprint fetches it; " +
  "if it was known before, somebody may be in between";
const REACH_HINT = "check the address, that the gateway runs, and that it listens there (K8E_LISTEN)";
const UNTRUSTED = /CERT|SELF_SIGNED|UNABLE_TO_VERIFY|UNABLE_TO_GET_ISSUER|ALTNAME/;

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
    const { endpoint } = this;
    const stream = session.request({
      [constants.HTTP2_HEADER_METHOD]: "POST",
      [constants.HTTP2_HEADER_PATH]: RUN,
      [constants.HTTP2_HEADER_CONTENT_TYPE]: "application/grpc",
      [constants.HTTP2_HEADER_TE]: "trailers",
      ...(endpoint.apiKey && { authorization: `Bearer ${endpoint.apiKey}` }),
    });
    const connection = new Connection();
    return connection.attach(new StreamPipe(session, stream, connection, this.endpoint));
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
      const found = await credentials.load(this.endpoint);
      if (this.session === undefined || !same(found, this.found)) {
        this.close(); // what goes on there comes to its end
        this.found = found;
        this.session = this.dial(found);
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

  private dial(found: credentials.Credentials): Promise<ClientHttp2Session> {
    const options: SecureClientSessionOptions = {
      ca: found.ca,
      cert: found.certificate,
      key: found.key,
      minVersion: "TLSv1.2",
      settings: { initialWindowSize: STREAM_WINDOW, enablePush: false },
    };
    return new Promise((resolve, reject) => {
      const session = connect(`https://${this.endpoint.target}`, options);
      const timer = setTimeout(() => {
        session.destroy(new Error(`no answer in ${CONNECT_MILLISECONDS / 1000} s`));
      }, CONNECT_MILLISECONDS);
      let failure: Error | undefined;
      session.on("error", (error: Error) => {
        failure = error;
      });
      session.once("close", () => {
        clearTimeout(timer);
        reject(unreachable(this.endpoint, failure));
      });
      session.once("connect", () => {
        clearTimeout(timer);
        session.setLocalWindowSize(SESSION_WINDOW);
        keepAlive(session);
        resolve(session);
      });
    });
  }
}

function same(one: credentials.Credentials, other: credentials.Credentials | undefined): boolean {
  const equal = (a: Buffer | undefined, b: Buffer | undefined): boolean => a === b || (a !== undefined && b?.equals(a) === true);
  return other !== undefined && equal(one.ca, other.ca) && equal(one.certificate, other.certificate) && equal(one.key, other.key);
}

/** Notices a half-dead connection while a program runs in silence. */
function keepAlive(session: ClientHttp2Session): void {
  const timer = setInterval(() => {
    const late = setTimeout(() => {
      session.destroy(new Error("it does not answer any more"));
    }, PONG_MILLISECONDS).unref();
    const sent = session.ping(() => {
      clearTimeout(late);
    });
    if (!sent) clearTimeout(late);
  }, PING_MILLISECONDS).unref();
  session.once("close", () => {
    clearInterval(timer);
  });
}

/** Why an endpoint cannot be reached. */
function unreachable(endpoint: Endpoint, error: Error | undefined): K8eError {
  const code = (error as NodeJS.ErrnoException | undefined)?.code ?? "";
  const why = error?.message || code || "the connection was closed";
  if (UNTRUSTED.test(code)) {
    return new UntrustedGateway(`the gateway at ${endpoint.target} is not trusted: ${why}`, { cause: error, hint: TRUST_HINT });
  }
  return new GatewayUnreachable(`the gateway at ${endpoint.target} cannot be reached: ${why}`, { cause: error, hint: REACH_HINT });
}

// The codes of gRPC.
const OK = 0;
const INVALID_ARGUMENT = 3;
const PERMISSION_DENIED = 7;
const RESOURCE_EXHAUSTED = 8;
const UNIMPLEMENTED = 12;
const UNAUTHENTICATED = 16;

/** The end of a `Run` call as one of our errors; undefined if the gateway just closed it. */
function ended(endpoint: Endpoint, status: number | undefined, details: string): K8eError | undefined {
  const at = `the gateway at ${endpoint.target}`;
  switch (status) {
    case undefined:
    case OK:
      return undefined;
    case PERMISSION_DENIED:
    case UNAUTHENTICATED:
      return new KeyRefused(`${at} refused us: ${details}`, { hint: KEY_HINT });
    case RESOURCE_EXHAUSTED:
      return new LimitExceeded(`${at}: ${details}`, { hint: "try again later, or have the key's limits raised" });
    case INVALID_ARGUMENT:
      return new InvalidRequest(`${at}: ${details}`);
    case UNIMPLEMENTED:
      return new NotImplementedYet(`${endpoint.target} does not offer what was asked for`, {
        hint: "check that it is a gateway of k8e, of a release that fits this client",
      });
    default:
      return new ConnectionLost(`${at} closed the connection: ${details || `status ${status}`}`);
  }
}

const PREFIX = 5;

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
    let status: number | undefined;
    let details = "";
    let failure: Error | undefined;
    const read = (headers: NodeJS.Dict<string | string[]>): void => {
      if (headers["grpc-status"] === undefined) return;
      status = Number(headers["grpc-status"]);
      details = decodeURIComponentSafely(String(headers["grpc-message"] ?? ""));
    };
    stream.on("response", (headers) => {
      read(headers);
      const http = headers[constants.HTTP2_HEADER_STATUS];
      if (Number(http) !== 200) failure = new Error(`HTTP status ${String(http)}`);
    });
    stream.on("trailers", (headers) => {
      read(headers as NodeJS.Dict<string | string[]>);
    });
    stream.on("data", (data: Buffer) => {
      this.take(data);
    });
    stream.on("error", (error: Error) => {
      failure = error;
    });
    stream.on("close", () => {
      if (this.held) uses(session, -1);
      this.held = false;
      const because = ended(endpoint, status, details);
      connection.closed(because ?? (failure && lost(endpoint, failure)), false);
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

  /** Tells the frames of all messages that are there as a whole. */
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
    const message = toBinary(RunFrameSchema, create(RunFrameSchema, { kind, channel, body: body }));
    const prefix = Buffer.allocUnsafe(PREFIX);
    prefix[0] = 0;
    prefix.writeUInt32BE(message.length, 1);
    stream.write(prefix);
    stream.write(message);
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

function decodeURIComponentSafely(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
