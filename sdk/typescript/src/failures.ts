/**
 * The errors of failed calls: those that gateways describe, and those of aborted signals.
 *
 * @module
 */

import { Aborted, ExecNotFound, FileError, InvalidRequest, K8eError, TimedOut } from "./errors.ts";
import { BY_CODE } from "./generated/errors.ts";
import type { Dict, Value } from "./wire.ts";

const ERRNO = /^E[A-Z0-9]{1,20}$/;

function text(value: Value | undefined, otherwise: string): string {
  return typeof value === "string" ? value : otherwise;
}

/** The error that a peer described; a peer chooses a code, never a class. */
export function fromWire(body: Dict): K8eError {
  const code = text(body.code, "");
  const reason = text(body.message, "unknown error");
  if (code === "ESRCH") return new ExecNotFound(reason);
  if (ERRNO.test(code)) return new FileError(code, reason);
  const kind = Object.hasOwn(BY_CODE, code) ? BY_CODE[code] : undefined;
  return new (kind ?? K8eError)(reason, { hint: text(body.hint, "") });
}

/** The error of a call whose signal was aborted, for a reason that may be that time was up. */
export function abortError(reason: unknown): K8eError {
  if (reason instanceof K8eError) return reason;
  if (reason instanceof Error && reason.name === "TimeoutError") {
    return new TimedOut("the gateway did not answer in the time that the call was given", {
      cause: reason,
      hint: "give it more (requestTimeout, or AbortSignal.timeout), or ask k8e status how the gateway is",
    });
  }
  return new Aborted(reason);
}

/** Refuses what is no signal: nothing could abort the call then. */
export function checkSignal(signal: AbortSignal | undefined): void {
  if (signal === undefined || typeof (signal as Partial<AbortSignal>).addEventListener === "function") return;
  throw new InvalidRequest("signal is no AbortSignal", { hint: "pass controller.signal, or AbortSignal.timeout(milliseconds)" });
}

/** What is waited for, unless the signal is aborted before. */
export function unlessAborted<T>(work: Promise<T>, signal: AbortSignal | undefined): Promise<T> {
  if (signal === undefined) return work;
  checkSignal(signal);
  return new Promise((resolve, reject) => {
    const aborted = (): void => {
      reject(abortError(signal.reason));
    };
    signal.addEventListener("abort", aborted, { once: true });
    void work.then(resolve, reject).finally(() => {
      signal.removeEventListener("abort", aborted);
    });
    if (signal.aborted) aborted();
  });
}
