/**
 * The bytes that a gateway and its clients exchange: frames, and the values inside them.
 *
 * A frame is a nine-byte header (length of the body, kind, channel) and a body. A channel is one
 * operation on one connection, numbered by the end that opens it with `CALL`. Nothing here trusts the
 * peer: lengths, depth and types are checked, and every defect is a {@link WireError}.
 *
 * @module
 */

/** Values that can be packed. Members that are undefined are left out. */
export type Packable =
  | null
  | undefined
  | boolean
  | number
  | bigint
  | string
  | Uint8Array
  | readonly Packable[]
  | { readonly [key: string]: Packable };

/** Unpacked values. Whole numbers beyond 2^53 are bigints. */
export type Value = null | boolean | number | bigint | string | Uint8Array | Value[] | Dict;

/** A packed mapping. */
export interface Dict {
  [key: string]: Value;
}

export const HEADER_SIZE = 9;
export const SEQ_SIZE = 8;
/** Largest body towards a gateway. */
export const MAX_REQUEST = 16 << 20;
/** Bytes in one DATA, OUT, ERR or STDIN frame. */
export const CHUNK = 256 << 10;
/** Bytes that may be under way on a channel before the receiver grants more. */
export const WINDOW = 1 << 20;
/** The most that a receiver may let be under way. */
export const MAX_WINDOW = 4 << 20;
/** Largest program that can be sent as data. */
export const MAX_CODE = 8 << 20;
export const MAX_ITEMS = 1 << 16;
const MAX_DEPTH = 8;

export const CALL = 1;
export const STDIN = 2;
export const STDIN_END = 3;
export const CREDIT = 4;
export const CANCEL = 5;
export const DATA = 6;
export const END = 7;
export const RESULT = 16;
export const ERROR = 17;
export const OUT = 18;
export const ERR = 19;
export const EXIT = 20;
export const SHOW = 21;
export const GOODBYE = 22;

const NONE = 78;
const TRUE = 84;
const FALSE = 70;
const INT = 105;
const FLOAT = 102;
const TEXT = 115;
const BYTES = 98;
const LIST = 108;
const DICT = 100;

const INT64_MIN = -(2n ** 63n);
const INT64_MAX = 2n ** 63n - 1n;

/** The peer sent bytes that are not of this protocol. */
export class WireError extends Error {
  override name = "WireError";
}

/** Grows as it is written to. One is enough: packing never waits for anything. */
class Writer {
  bytes = Buffer.allocUnsafeSlow(16 << 10);
  length = 0;

  reserve(count: number): number {
    const at = this.length;
    const needed = at + count;
    if (needed > this.bytes.length) {
      const larger = Buffer.allocUnsafeSlow(Math.max(needed, 2 * this.bytes.length));
      this.bytes.copy(larger, 0, 0, at);
      this.bytes = larger;
    }
    this.length = needed;
    return at;
  }

  byte(value: number): void {
    const at = this.reserve(1);
    this.bytes[at] = value;
  }

  head(tag: number, length: number): void {
    const at = this.reserve(5);
    this.bytes[at] = tag;
    this.bytes.writeUInt32BE(length, at + 1);
  }

  text(text: string): void {
    if (!text.isWellFormed()) {
      const escaped = escapedBytes(text);
      this.head(TEXT, escaped.length);
      const at = this.reserve(escaped.length);
      escaped.copy(this.bytes, at);
      return;
    }
    const length = Buffer.byteLength(text);
    this.head(TEXT, length);
    const at = this.reserve(length); // which may replace the buffer
    this.bytes.write(text, at, length, "utf8");
  }

  take(): Buffer {
    const taken = Buffer.from(this.bytes.subarray(0, this.length));
    this.length = 0;
    if (this.bytes.length > 1 << 20) this.bytes = Buffer.allocUnsafeSlow(16 << 10);
    return taken;
  }
}

const writer = new Writer();

/** Encode a value. */
export function pack(value: Packable): Buffer {
  writer.length = 0;
  put(value, 0);
  return writer.take();
}

function put(value: Packable, depth: number): void {
  switch (typeof value) {
    case "string":
      writer.text(value);
      return;
    case "number":
      putNumber(value);
      return;
    case "boolean":
      writer.byte(value ? TRUE : FALSE);
      return;
    case "bigint": {
      if (value < INT64_MIN || value > INT64_MAX) throw new RangeError(`${value} has more than 64 bits`);
      const at = writer.reserve(9);
      writer.bytes[at] = INT;
      writer.bytes.writeBigInt64BE(value, at + 1);
      return;
    }
    case "object":
      putObject(value, depth);
      return;
    case "undefined":
      writer.byte(NONE);
      return;
    default:
      throw new TypeError(`cannot send a ${typeof value}`);
  }
}

function putNumber(value: number): void {
  const at = writer.reserve(9);
  if (Number.isSafeInteger(value)) {
    writer.bytes[at] = INT;
    writer.bytes.writeInt32BE(Math.floor(value / 0x1_0000_0000), at + 1);
    writer.bytes.writeUInt32BE(value >>> 0, at + 5);
  } else {
    writer.bytes[at] = FLOAT;
    writer.bytes.writeDoubleBE(value, at + 1);
  }
}

function putObject(value: Exclude<Packable, string | number | boolean | bigint | undefined>, depth: number): void {
  if (value === null) {
    writer.byte(NONE);
  } else if (value instanceof Uint8Array) {
    writer.head(BYTES, value.length);
    const at = writer.reserve(value.length);
    writer.bytes.set(value, at);
  } else if (depth >= MAX_DEPTH) {
    throw new TypeError(`cannot send what is nested more than ${MAX_DEPTH} levels deep`);
  } else if (Array.isArray(value)) {
    writer.head(LIST, value.length);
    for (const item of value as readonly Packable[]) put(item, depth + 1);
  } else {
    const members = Object.entries(value).filter((member) => member[1] !== undefined);
    writer.head(DICT, members.length);
    for (const [key, item] of members) {
      writer.text(key);
      put(item, depth + 1);
    }
  }
}

/** Decode one packed value that must be a mapping and fill `data` exactly. */
export function unpackDict(data: Buffer, most = MAX_ITEMS): Dict {
  const value = unpack(data, most);
  if (value === null || typeof value !== "object" || Array.isArray(value) || value instanceof Uint8Array) {
    throw new WireError("expected a mapping");
  }
  return value;
}

/** Decode one packed value of at most `most` items that must fill `data` exactly. */
export function unpack(data: Buffer, most = MAX_ITEMS): Value {
  const reader = new Reader(data, most);
  const value = reader.value(0);
  if (reader.at !== data.length) throw new WireError("bytes after the value");
  return value;
}

class Reader {
  at = 0;
  private readonly data: Buffer;
  private left: number;

  constructor(data: Buffer, most: number) {
    this.data = data;
    this.left = most;
  }

  value(depth: number): Value {
    const { data, at } = this;
    const tag = data[at];
    switch (tag) {
      case INT:
        this.skip(9);
        return integer(data, at + 1);
      case FALSE:
      case TRUE:
        this.at = at + 1;
        return tag === TRUE;
      case NONE:
        this.at = at + 1;
        return null;
      case FLOAT:
        this.skip(9);
        return data.readDoubleBE(at + 1);
      case TEXT:
        return this.text();
      case BYTES: {
        const length = this.length();
        return Buffer.from(data.subarray(this.at, (this.at += length)));
      }
      case LIST:
        return this.list(depth);
      case DICT:
        return this.dict(depth);
      default:
        throw new WireError(`unknown tag ${tag}`);
    }
  }

  private skip(count: number): void {
    if (this.at + count > this.data.length) throw new WireError("a value that is cut off");
    this.at += count;
  }

  private length(): number {
    const at = this.at;
    this.skip(5);
    const length = this.data.readUInt32BE(at + 1);
    // Items take at least one byte each, so a length beyond the data is a lie in every case.
    if (length > this.data.length - this.at) throw new WireError("length beyond the data");
    return length;
  }

  private text(): string {
    const length = this.length();
    const start = this.at;
    this.at += length;
    return decoded(this.data, start, this.at);
  }

  private items(depth: number): number {
    const count = this.length();
    this.left -= count;
    if (depth >= MAX_DEPTH || this.left < 0) throw new WireError("nested too deeply, or of too many values");
    return count;
  }

  private list(depth: number): Value[] {
    const items: Value[] = [];
    for (let count = this.items(depth); count > 0; count -= 1) items.push(this.value(depth + 1));
    return items;
  }

  private dict(depth: number): Dict {
    const items: Dict = Object.create(null) as Dict; // a peer's key may be "__proto__"
    for (let count = this.items(depth); count > 0; count -= 1) {
      if (this.data[this.at] !== TEXT) throw new WireError("a key that is not text");
      const key = this.text();
      items[key] = this.value(depth + 1);
    }
    return items;
  }
}

function integer(data: Buffer, at: number): number | bigint {
  const high = data.readInt32BE(at);
  if (high >= -0x20_0000 && high < 0x20_0000) return high * 0x1_0000_0000 + data.readUInt32BE(at + 4);
  return data.readBigInt64BE(at);
}

function decoded(data: Buffer, start: number, end: number): string {
  const text = data.toString("utf8", start, end);
  return text.includes("\ufffd") ? unescaped(data.subarray(start, end)) : text;
}

// Names of files may be bytes that are no UTF-8. They travel as Python has them: the byte 0xNN is the
// lone surrogate U+DCNN, so that a path that came from a listing can be used again.

const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

function unescaped(bytes: Buffer): string {
  let text = "";
  for (let at = 0; at < bytes.length; ) {
    const first = bytes[at] ?? 0;
    const length = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    try {
      text += strict.decode(bytes.subarray(at, at + length));
      at += length;
    } catch {
      text += String.fromCharCode(0xdc00 + first);
      at += 1;
    }
  }
  return text;
}

/** Text as it travels. */
export function escapedBytes(text: string): Buffer {
  if (text.isWellFormed()) return Buffer.from(text);
  const parts: Buffer[] = [];
  for (const char of text) {
    const code = char.codePointAt(0) ?? 0;
    if (code >= 0xdc80 && code <= 0xdcff) parts.push(Buffer.from([code - 0xdc00]));
    else parts.push(Buffer.from(char));
  }
  return Buffer.concat(parts);
}

/** A header of a frame. */
export function header(length: number, kind: number, channel: number): Buffer {
  const bytes = Buffer.allocUnsafe(HEADER_SIZE);
  bytes.writeUInt32BE(length, 0);
  bytes[4] = kind;
  bytes.writeUInt32BE(channel, 5);
  return bytes;
}

/** The body of a CREDIT frame. */
export function creditBody(count: number): Buffer {
  const body = Buffer.allocUnsafe(4);
  body.writeUInt32BE(count, 0);
  return body;
}

/** The number of the first byte of an OUT, ERR or SHOW. */
export function sequence(body: Buffer): number {
  if (body.length <= SEQ_SIZE) throw new WireError("a frame without bytes");
  return body.readUInt32BE(0) * 0x1_0000_0000 + body.readUInt32BE(4);
}

/** Called with each frame; it may keep the body. */
export type OnFrame = (kind: number, channel: number, body: Buffer) => void;

/** Returns the memory for a coming body, if it has any already. */
export type PlaceOf = (kind: number, channel: number, length: number) => Buffer | undefined;

const EMPTY = Buffer.alloc(0);

/** Cuts a byte stream into frames. */
export class Splitter {
  private readonly head = Buffer.allocUnsafe(HEADER_SIZE);
  private headLength = 0;
  private body: Buffer | undefined;
  private bodyLength = 0;
  private readonly limit: number;
  private readonly onFrame: OnFrame;
  private readonly placeOf: PlaceOf;

  constructor(limit: number, onFrame: OnFrame, placeOf: PlaceOf = () => undefined) {
    this.limit = limit;
    this.onFrame = onFrame;
    this.placeOf = placeOf;
  }

  /** Takes bytes in, and passes on the frames that they complete. They may be overwritten afterwards. */
  feed(data: Buffer): void {
    let at = 0;
    while (at < data.length) {
      if (this.body === undefined) {
        const take = Math.min(HEADER_SIZE - this.headLength, data.length - at);
        data.copy(this.head, this.headLength, at, at + take);
        this.headLength += take;
        at += take;
        if (this.headLength < HEADER_SIZE) return;
        const length = this.head.readUInt32BE(0);
        if (length > this.limit) throw new WireError(`frame of ${length} bytes; the limit is ${this.limit}`);
        const place = this.placeOf(this.head[4] ?? 0, this.head.readUInt32BE(5), length);
        this.body = length === 0 ? EMPTY : (place ?? Buffer.allocUnsafe(length));
        this.bodyLength = 0;
      }
      const take = Math.min(this.body.length - this.bodyLength, data.length - at);
      data.copy(this.body, this.bodyLength, at, at + take);
      this.bodyLength += take;
      at += take;
      if (this.bodyLength < this.body.length) return;
      const body = this.body;
      this.body = undefined;
      this.headLength = 0;
      this.onFrame(this.head[4] ?? 0, this.head.readUInt32BE(5), body);
    }
  }
}
