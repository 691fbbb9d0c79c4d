/**
 * Every error that the SDK raises. Those that gateways send are generated from k8e's own table; the
 * others say more exactly what went wrong between here and a gateway.
 *
 * A program that fails is a result, never an error.
 *
 * @module
 */

import { Denied, FILE_HINTS, GatewayUnreachable, K8eError } from "./generated/errors.ts";

export {
  ApprovalNotFound,
  ClientClosed,
  Conflict,
  ContextEnded,
  ContextNotFound,
  Denied,
  ExecNotFound,
  GatewayUnreachable,
  GuestFailed,
  ImageNotFound,
  ImageUnusable,
  InvalidRequest,
  K8eError,
  LimitExceeded,
  NotExposed,
  NotImplementedYet,
  RuntimeUnusable,
  SandboxDied,
  SecretNotFound,
  SessionElsewhere,
  SessionNotFound,
  SessionPaused,
  SnapshotNotFound,
  StateUnusable,
  StoreUnreachable,
  TokenRefused,
  TemplateNotFound,
  TimedOut,
  ToolFailed,
} from "./generated/errors.ts";

const STATUS_HINT = "k8e status shows the gateway's state; its log is gateway.log in the data folder";

/** No gateway runs on this machine, and none can be started. */
export class NoGateway extends GatewayUnreachable {
  override name = "NoGateway";
}

/** The gateway's certificate is not one that we trust, so nothing was sent. */
export class UntrustedGateway extends GatewayUnreachable {
  override name = "UntrustedGateway";
}

/** The gateway does not accept the API key or the certificate, or requires one. */
export class KeyRefused extends Denied {
  override name = "KeyRefused";
}

/** The connection ended before the answer came. */
export class ConnectionLost extends GatewayUnreachable {
  override name = "ConnectionLost";
  /** Whether the gateway certainly never read the call, so that it can be sent again. */
  readonly unread: boolean;

  constructor(reason: string, options: { hint?: string; cause?: unknown; unread?: boolean } = {}) {
    super(reason, { hint: STATUS_HINT, ...options });
    this.unread = options.unread ?? false;
  }
}

/**
 * The connection ended while a program ran, and could not be taken up again. The program goes on in its
 * sandbox, and was not started again.
 */
export class ProgramLost extends ConnectionLost {
  override name = "ProgramLost";
  readonly sessionId: string;
  readonly execId: string;

  constructor(because: K8eError, sessionId: string, execId: string) {
    super(`${because.message} while command ${execId} ran in session ${sessionId}`, {
      cause: because,
      hint:
        "the command goes on in its sandbox until it ends or times out, and was not started again; " +
        `getRun("${sessionId}.${execId}") comes back to it`,
    });
    this.sessionId = sessionId;
    this.execId = execId;
  }
}

/** An AbortSignal ended the call; its reason is the `cause`. A program that was being run is killed. */
export class Aborted extends K8eError {
  override readonly code: string = "aborted";
  /** The code of the platform's own abort errors, which libraries look for. */
  override name = "AbortError";

  constructor(cause?: unknown) {
    super("the call was aborted by its signal", {
      cause,
      hint: "nothing is left to do: a program that it ran was killed, and what it wrote stays",
    });
  }
}

/** An operation on a file of a sandbox failed. Its `code` is an error number's name, like `ENOENT`. */
export class FileError extends K8eError {
  override readonly code: string;
  override name = "FileError";

  constructor(code: string, reason: string) {
    super(reason, {
      hint: FILE_HINTS[code] ?? "the path is one of the sandbox's own; listFiles(sessionId) shows what is there",
    });
    this.code = code;
  }
}
