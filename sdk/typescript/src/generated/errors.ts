// Written by sdk/typescript/generate.py from src/k8e/errors.py. Do not change it here.

/** Something that k8e could not do, with what the caller can do about it. */
export class K8eError extends Error {
  /** Which error it is, in a word that never changes. */
  readonly code: string = "internal";
  /** What happened, in words; the same as `message`. */
  readonly reason: string;
  /** What to do next; may be empty. */
  readonly hint: string;
  override name = "K8eError";

  constructor(reason: string, options: { hint?: string; cause?: unknown } = {}) {
    super(reason, options.cause === undefined ? undefined : { cause: options.cause });
    this.reason = reason;
    this.hint = options.hint ?? "";
  }
}

/** The request is malformed or contradicts itself. */
export class InvalidRequest extends K8eError {
  override readonly code: string = "invalid_request";
  override name = "InvalidRequest";
}

/** No session has this id, or it has another owner; the two look the same on purpose. */
export class SessionNotFound extends K8eError {
  override readonly code: string = "session_not_found";
  override name = "SessionNotFound";
}

/** The session's sandbox is on another gateway; the message names it and its address. */
export class SessionElsewhere extends K8eError {
  override readonly code: string = "session_elsewhere";
  override name = "SessionElsewhere";
}

/** The session is frozen: nothing can be done in it before it is resumed. */
export class SessionPaused extends K8eError {
  override readonly code: string = "session_paused";
  override name = "SessionPaused";
}

/** The session has no exec of this id (it may have ended long ago). */
export class ExecNotFound extends K8eError {
  override readonly code: string = "exec_not_found";
  override name = "ExecNotFound";
}

/** The session has no context of this id. */
export class ContextNotFound extends K8eError {
  override readonly code: string = "context_not_found";
  override name = "ContextNotFound";
}

/** The program of a context has ended, and its variables with it; the message says why. */
export class ContextEnded extends K8eError {
  override readonly code: string = "context_ended";
  override name = "ContextEnded";
}

/** No approval has this id, or it has another owner, or it ended long ago. */
export class ApprovalNotFound extends K8eError {
  override readonly code: string = "approval_not_found";
  override name = "ApprovalNotFound";
}

/** No snapshot of the caller has this name. */
export class SnapshotNotFound extends K8eError {
  override readonly code: string = "snapshot_not_found";
  override name = "SnapshotNotFound";
}

/** The caller has no secret of this name, in this tenant. */
export class SecretNotFound extends K8eError {
  override readonly code: string = "secret_not_found";
  override name = "SecretNotFound";
}

/** No template has this name. */
export class TemplateNotFound extends K8eError {
  override readonly code: string = "template_not_found";
  override name = "TemplateNotFound";
}

/** No image has this reference: none that was pulled, or none in its registry. */
export class ImageNotFound extends K8eError {
  override readonly code: string = "image_not_found";
  override name = "ImageNotFound";
}

/** An image, archive or folder cannot be a sandbox's root; the message says why. */
export class ImageUnusable extends K8eError {
  override readonly code: string = "image_unusable";
  override name = "ImageUnusable";
}

/** The port of a session is not exposed, so there is nothing to end. */
export class NotExposed extends K8eError {
  override readonly code: string = "not_exposed";
  override name = "NotExposed";
}

/** No decision came in time, or an approval has expired. */
export class TimedOut extends K8eError {
  override readonly code: string = "timed_out";
  override name = "TimedOut";
}

/** An id is already used for something else. */
export class Conflict extends K8eError {
  override readonly code: string = "conflict";
  override name = "Conflict";
}

/** Stored state cannot be used; it was left as it is, and sandboxes go on. */
export class StateUnusable extends K8eError {
  override readonly code: string = "state_unusable";
  override name = "StateUnusable";
}

/** The database does not answer; the request was not written down, so it was not carried out. */
export class StoreUnreachable extends K8eError {
  override readonly code: string = "store_unreachable";
  override name = "StoreUnreachable";
}

/** The caller is not allowed to do this. */
export class Denied extends K8eError {
  override readonly code: string = "denied";
  override name = "Denied";
}

/** A token is not good here and now, or not for this sandbox or operation. */
export class TokenRefused extends K8eError {
  override readonly code: string = "token_refused";
  override name = "TokenRefused";
}

/** A limit was reached; the message names it. */
export class LimitExceeded extends K8eError {
  override readonly code: string = "limit_exceeded";
  override name = "LimitExceeded";
}

/** A runtime cannot be used on this host; the message says why. */
export class RuntimeUnusable extends K8eError {
  override readonly code: string = "runtime_unusable";
  override name = "RuntimeUnusable";
}

/** Part of the interface, not yet of the product. */
export class NotImplementedYet extends K8eError {
  override readonly code: string = "unimplemented";
  override name = "NotImplementedYet";
}

/** The sandbox ended by itself; the message says why, if that is known. */
export class SandboxDied extends K8eError {
  override readonly code: string = "sandbox_died";
  override name = "SandboxDied";
}

/** A program that k8e needs ended with an error or did not end in time. */
export class ToolFailed extends K8eError {
  override readonly code: string = "tool_failed";
  override name = "ToolFailed";
}

/** The guest did not answer, or broke the protocol. */
export class GuestFailed extends K8eError {
  override readonly code: string = "guest_failed";
  override name = "GuestFailed";
}

/** The client was closed, so it does nothing more; raised by the SDK, never sent. */
export class ClientClosed extends K8eError {
  override readonly code: string = "client_closed";
  override name = "ClientClosed";

  constructor(reason = "the client is closed", options: { hint?: string; cause?: unknown } = {}) {
    super(reason, { hint: "make a new one", ...options });
  }
}

/** No gateway could be reached or started. */
export class GatewayUnreachable extends K8eError {
  override readonly code: string = "gateway_unreachable";
  override name = "GatewayUnreachable";
}

/** The classes by their codes on the wire. */
export const BY_CODE: Readonly<Record<string, typeof K8eError>> = {
  invalid_request: InvalidRequest,
  session_not_found: SessionNotFound,
  session_elsewhere: SessionElsewhere,
  session_paused: SessionPaused,
  exec_not_found: ExecNotFound,
  context_not_found: ContextNotFound,
  context_ended: ContextEnded,
  approval_not_found: ApprovalNotFound,
  snapshot_not_found: SnapshotNotFound,
  secret_not_found: SecretNotFound,
  template_not_found: TemplateNotFound,
  image_not_found: ImageNotFound,
  image_unusable: ImageUnusable,
  not_exposed: NotExposed,
  timed_out: TimedOut,
  conflict: Conflict,
  state_unusable: StateUnusable,
  store_unreachable: StoreUnreachable,
  denied: Denied,
  token_refused: TokenRefused,
  limit_exceeded: LimitExceeded,
  runtime_unusable: RuntimeUnusable,
  unimplemented: NotImplementedYet,
  sandbox_died: SandboxDied,
  tool_failed: ToolFailed,
  guest_failed: GuestFailed,
  client_closed: ClientClosed,
  gateway_unreachable: GatewayUnreachable,
};

/** What to do about a failed operation on a file of a sandbox. */
export const FILE_HINTS: Readonly<Record<string, string>> = {
  ENOSPC: "the folder is full, by bytes or by files: remove some, or make a session with more (--disk and --inodes, limits={'disk': …}; /tmp and /home count as memory)",
  EDQUOT: "the folder is full, by bytes or by files: remove some, or make a session with more (--disk and --inodes, limits={'disk': …}; /tmp and /home count as memory)",
  EFBIG: "the file is larger than this file system takes; write several files",
  ENOMEM: "the session's memory is used up: end programs, empty /tmp, or make a session with more (--memory, limits={'memory': …})",
  EAGAIN: "the session has as many processes as it may: end some, or make a session with more (--pids, limits={'pids': …})",
  EMFILE: "too many files are open: close some, or make a session with more (--open-files, limits={'open_files': …})",
  ENFILE: "too many files are open on the machine; try again later",
  EROFS: "/workspace, /tmp and /home/user are the ones that programs may write to",
  EACCES: "programs run as uid 1000, without rights beyond that; /workspace, /tmp and /home/user are the ones that programs may write to",
  EPERM: "programs run as uid 1000, without rights beyond that; /workspace, /tmp and /home/user are the ones that programs may write to",
  EEXIST: "it is there already: remove it first, or use another name",
  EISDIR: "it is a folder: name a file in it",
  ENOTEMPTY: "remove what is in the folder first",
  ELOOP: "its symbolic links lead in a circle, or through too many of them",
  ENAMETOOLONG: "a name may have 255 bytes, a path 4,095",
  EXDEV: "a file cannot be moved from one file system to another; copy it, and remove it",
  ETXTBSY: "the program is running; end it first",
  EBUSY: "something uses it, or is mounted there",
  EIO: "the disk of the workspace failed; copy what can be read into a new session",
  ECONNREFUSED: "nothing listens there in the sandbox; start the server first",
  ETIMEDOUT: "nothing answered in time in the sandbox",
};
