/**
 * Content for a sandbox, cut into pieces that fit a frame.
 *
 * @module
 */

import type { Lane } from "./connection.ts";
import { InvalidRequest } from "./errors.ts";
import { CHUNK, escapedBytes } from "./wire.ts";

/** Text or bytes. */
export type Piece = string | ArrayBuffer | ArrayBufferView;

/**
 * The input of a program, or the content of a file: text, bytes, a Blob, a web or Node.js stream, or any iterable of
 * text and bytes.
 */
export type Content = Piece | Blob | ReadableStream<Piece> | AsyncIterable<Piece> | Iterable<Piece>;

/** Called with the number of bytes that were moved, and the total if it is known. */
export type Progress = (done: number, total: number | undefined) => void;

function isPiece(content: Content): content is Piece {
  return typeof content === "string" || content instanceof ArrayBuffer || ArrayBuffer.isView(content);
}

/** Refuses what cannot be sent, before anything is asked of a gateway. */
export function checkContent(content: Content): void {
  if (isPiece(content) || content instanceof Blob) return;
  const given: unknown = content;
  if (typeof given === "object" && given !== null && (Symbol.asyncIterator in given || Symbol.iterator in given)) return;
  const shown = given === null || given === undefined ? "nothing" : `a value of type ${typeof given}`;
  throw new InvalidRequest(`what is sent is neither text nor bytes, but ${shown}`, {
    hint: "pass text, bytes, a Blob, a stream, or an iterable of text and bytes; JSON.stringify() makes text of a value",
  });
}

/** A piece as bytes. */
export function bytesOf(piece: Piece): Uint8Array {
  if (typeof piece === "string") return escapedBytes(piece);
  if (piece instanceof ArrayBuffer) return new Uint8Array(piece);
  if (ArrayBuffer.isView(piece)) return new Uint8Array(piece.buffer, piece.byteOffset, piece.byteLength);
  throw new InvalidRequest("a piece of what is sent is neither text nor bytes", { hint: "iterables give text and bytes" });
}

/** How many bytes will be sent, if that is known. */
export function sizeOf(content: Content): number | undefined {
  if (isPiece(content)) return bytesOf(content).length;
  return content instanceof Blob ? content.size : undefined;
}

/** Cuts bytes into what fits a frame. */
export function* cut(bytes: Uint8Array): Generator<Uint8Array, void> {
  for (let at = 0; at < bytes.length; at += CHUNK) yield bytes.subarray(at, at + CHUNK);
}

async function* pieces(content: Content): AsyncGenerator<Piece, void> {
  if (isPiece(content)) yield content;
  else if (content instanceof Blob) yield* content.stream() as AsyncIterable<Uint8Array>;
  else yield* content as AsyncIterable<Piece>;
}

/**
 * Sends content in frames of `kind`, never more than the other end has room for, and then a frame of `end`.
 * Stops if the other end wants no more.
 */
export async function feed(
  lane: Lane,
  content: Content,
  kinds: { kind: number; end: number; progress?: Progress | undefined },
): Promise<void> {
  const { kind, end, progress } = kinds;
  const total = sizeOf(content);
  let sent = 0;
  for await (const piece of pieces(content)) {
    for (const part of cut(bytesOf(piece))) {
      if (!(await lane.mayFeed(part.length))) return;
      lane.credit -= part.length;
      lane.send(kind, part);
      sent += part.length;
      progress?.(sent, total);
    }
  }
  if (await lane.mayFeed(0)) lane.send(end);
}

const decoder = new TextDecoder("utf-8", { ignoreBOM: true });

/** Bytes as text; invalid UTF-8 is replaced. */
export function decode(bytes: Uint8Array): string {
  return decoder.decode(bytes);
}
