/**
 * HTTP/2 and gRPC towards a gateway, as far as they are needed here: a session over TLS, the messages and the
 * end of a call, and a call with one answer.
 *
 * @module
 */

import { create, type DescMessage, fromBinary, type MessageInitShape, type MessageShape, toBinary } from "@bufbuild/protobuf";
import { type ClientHttp2Session, type ClientHttp2Stream, connect, constants } from "node:http2";
import type { OutgoingHttpHeaders, SecureClientSessionOptions } from "node:http2";

import type { Credentials } from "./credentials.ts";
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

export const MAX_MESSAGE = 64 << 20;
const STREAM_WINDOW = 8 << 20;
const SESSION_WINDOW = 32 << 20;
const CONNECT_MILLISECONDS = 20_000;
const PING_MILLISECONDS = 90_000;
const PONG_MILLISECONDS = 20_000;
export const KEY_HINT =
  "k8e sandbox api-key create NAME on the gateway's machine makes a key; pass it as apiKey or K8E_SANDBOX_APIKEY";
const TRUST_HINT =
  "check that its CA is known here: K8E_SANDBOX_CERT names its ca.crt, k8e sandbox login --ca-fingerprint fetches it; " +
  "if it was known before, somebody may be in between";
export const REACH_HINT = "check the address, that the gateway runs, and that it listens there (K8E_LISTEN)";
const UNTRUSTED = /CERT|SELF_SIGNED|UNABLE_TO_VERIFY|UNABLE_TO_GET_ISSUER|ALTNAME/;
/** Bytes before each message: whether it is compressed, and its length. */
export const PREFIX = 5;
const MAX_ANSWER = 1 << 20;

/** HTTP/2 over TLS towards an endpoint. */
export function dial(endpoint: Endpoint, found: Credentials): Promise<ClientHttp2Session> {
  const options: SecureClientSessionOptions = {
    ca: found.ca,
    cert: found.certificate,
    key: found.key,
    minVersion: "TLSv1.2",
    settings: { initialWindowSize: STREAM_WINDOW, enablePush: false },
  };
  return new Promise((resolve, reject) => {
    let session: ClientHttp2Session;
    try {
      session = connect(`https://${endpoint.target}`, options);
    } catch (error) {
      // Of files that do not belong together, for example during a login.
      reject(unreachable(endpoint, error as Error));
      return;
    }
    const timer = setTimeout(() => {
      session.destroy(new Error(`no answer in ${CONNECT_MILLISECONDS / 1000} s`));
    }, CONNECT_MILLISECONDS);
    let failure: Error | undefined;
    session.on("error", (error: Error) => {
      failure = error;
    });
    session.once("close", () => {
      clearTimeout(timer);
      reject(unreachable(endpoint, failure));
    });
    session.once("connect", () => {
      clearTimeout(timer);
      session.setLocalWindowSize(SESSION_WINDOW);
      keepAlive(session);
      resolve(session);
    });
  });
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

/** The headers of a call. */
export function headersOf(endpoint: Endpoint, path: string): OutgoingHttpHeaders {
  return {
    [constants.HTTP2_HEADER_METHOD]: "POST",
    [constants.HTTP2_HEADER_PATH]: path,
    [constants.HTTP2_HEADER_CONTENT_TYPE]: "application/grpc",
    [constants.HTTP2_HEADER_TE]: "trailers",
    ...(endpoint.apiKey && { authorization: `Bearer ${endpoint.apiKey}` }),
  };
}

/** A message as it is sent. */
export function message(content: Uint8Array): readonly [prefix: Buffer, content: Uint8Array] {
  const prefix = Buffer.allocUnsafe(PREFIX);
  prefix[0] = 0;
  prefix.writeUInt32BE(content.length, 1);
  return [prefix, content];
}

/** How a call ended, once its stream is closed. */
export interface CallStatus {
  /** Undefined if the gateway sent none. */
  status: number | undefined;
  details: string;
  /** What happened to the stream. */
  failure: Error | undefined;
}

/** Notes how a call ends. */
export function statusOf(stream: ClientHttp2Stream): CallStatus {
  const told: CallStatus = { status: undefined, details: "", failure: undefined };
  const read = (headers: NodeJS.Dict<string | string[]>): void => {
    if (headers["grpc-status"] === undefined) return;
    told.status = Number(headers["grpc-status"]);
    told.details = decodeURIComponentSafely(String(headers["grpc-message"] ?? ""));
  };
  stream.on("response", (headers) => {
    read(headers);
    const http = headers[constants.HTTP2_HEADER_STATUS];
    if (Number(http) !== 200) told.failure = new Error(`HTTP status ${String(http)}`);
  });
  stream.on("trailers", (headers) => {
    read(headers as NodeJS.Dict<string | string[]>);
  });
  stream.on("error", (error: Error) => {
    told.failure = error;
  });
  return told;
}

// The codes of gRPC.
const OK = 0;
const INVALID_ARGUMENT = 3;
const PERMISSION_DENIED = 7;
const RESOURCE_EXHAUSTED = 8;
const UNIMPLEMENTED = 12;
const UNAUTHENTICATED = 16;

/** The end of a call as one of our errors; undefined if it ended well, or the gateway just closed it. */
export function ended(endpoint: Endpoint, told: CallStatus): K8eError | undefined {
  const { status, details } = told;
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

/** A call with one request and one answer, within a time limit. */
export function ask<Question extends DescMessage, Answer extends DescMessage>(
  session: ClientHttp2Session,
  endpoint: Endpoint,
  call: { path: string; question: Question; answer: Answer; milliseconds: number },
  fields: MessageInitShape<Question>,
): Promise<MessageShape<Answer>> {
  const stream = session.request(headersOf(endpoint, call.path));
  const told = statusOf(stream);
  const parts: Buffer[] = [];
  let length = 0;
  stream.on("data", (data: Buffer) => {
    length += data.length;
    if (length > MAX_ANSWER) stream.close(constants.NGHTTP2_CANCEL);
    else parts.push(data);
  });
  const timer = setTimeout(() => {
    stream.destroy(new Error(`no answer in ${call.milliseconds / 1000} s`));
  }, call.milliseconds);
  for (const part of message(toBinary(call.question, create(call.question, fields)))) stream.write(part);
  stream.end();
  return new Promise((resolve, reject) => {
    stream.on("close", () => {
      clearTimeout(timer);
      try {
        const because = ended(endpoint, told);
        if (because !== undefined) throw because;
        if (told.status !== OK) throw unreachable(endpoint, told.failure);
        const content = Buffer.concat(parts);
        if (content[0] !== 0 || content.length !== PREFIX + content.readUInt32BE(1)) throw new Error("not one message");
        resolve(fromBinary(call.answer, content.subarray(PREFIX)));
      } catch (error) {
        reject(error);
      }
    });
  });
}

function decodeURIComponentSafely(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
