// The program of a Node context: takes cells of code, runs them in one scope, tells results.
//
// What it says, and to whom, is in kernel.py. V8's own way for consoles (`replMode`) lets a cell
// await, and declare again what an earlier one declared.
"use strict";

const { Session } = require("inspector");
const { createRequire } = require("module");
const { Socket } = require("net");
const { inspect } = require("util");
const vm = require("vm");

const CALL = 1, CANCEL = 5, EXIT = 20, SHOW = 21, HELLO = 32;
const HEADER_SIZE = 9;
const MAX_TEXT = 1 << 20, MAX_RICH = 6 << 20, MAX_VALUE = 16 << 10, MAX_STACK = 64 << 10;
const INTERRUPTED = 130;
const OURS = /node:|\/kernels[-/]|evalmachine|new Promise \(<anonymous>\)/; // frames below a cell

const control = new Socket({ fd: Number(process.argv[2]), readable: true, writable: true });
const session = new Session();
let cell = 0; // the number of the cell that runs
let interrupted = null; // ends the cell that waits for something

// Values, as wire.py packs them.

function packed(value) {
  const parts = [];
  const head = (tag, length) => {
    const bytes = Buffer.alloc(5);
    bytes.write(tag, 0, "latin1");
    bytes.writeUInt32BE(length, 1);
    parts.push(bytes);
  };
  const put = (item) => {
    if (item === null || item === undefined) parts.push(Buffer.from("N"));
    else if (item === true) parts.push(Buffer.from("T"));
    else if (item === false) parts.push(Buffer.from("F"));
    else if (typeof item === "number") {
      const bytes = Buffer.alloc(9);
      bytes.write("i", 0, "latin1");
      bytes.writeBigInt64BE(BigInt(Math.trunc(item)), 1);
      parts.push(bytes);
    } else if (Buffer.isBuffer(item)) {
      head("b", item.length);
      parts.push(item);
    } else if (Array.isArray(item)) {
      head("l", item.length);
      item.forEach(put);
    } else if (typeof item === "object") {
      const pairs = Object.entries(item);
      head("d", pairs.length);
      for (const [key, inner] of pairs) {
        put(String(key));
        put(inner);
      }
    } else {
      const bytes = Buffer.from(String(item));
      head("s", bytes.length);
      parts.push(bytes);
    }
  };
  put(value);
  return Buffer.concat(parts);
}

function unpacked(data) {
  let at = 0;
  const take = () => {
    const tag = String.fromCharCode(data[at++]);
    if (tag === "N") return null;
    if (tag === "T" || tag === "F") return tag === "T";
    if (tag === "i" || tag === "f") {
      at += 8;
      return tag === "i" ? Number(data.readBigInt64BE(at - 8)) : data.readDoubleBE(at - 8);
    }
    const length = data.readUInt32BE(at);
    at += 4;
    if (tag === "l") return Array.from({ length }, take);
    if (tag === "d") {
      const found = Object.create(null);
      for (let count = 0; count < length; count++) {
        const key = take();
        found[key] = take();
      }
      return found;
    }
    const bytes = data.subarray(at, (at += length));
    return tag === "s" ? bytes.toString() : Buffer.from(bytes);
  };
  return take();
}

function send(kind, value) {
  const body = packed(value);
  const header = Buffer.alloc(HEADER_SIZE);
  header.writeUInt32BE(body.length, 0);
  header.writeUInt8(kind, 4);
  header.writeUInt32BE(cell, 5);
  control.write(Buffer.concat([header, body]));
}

// Results.

function described(value) {
  const found = {};
  if (value !== null && typeof value === "object" && !Buffer.isBuffer(value)) {
    try {
      const text = JSON.stringify(value);
      const plain = [Object.prototype, Array.prototype, null].includes(Object.getPrototypeOf(value));
      if (plain && text !== undefined) found["application/json"] = text;
    } catch {
      // it has no JSON
    }
  }
  found["text/plain"] = inspect(value);
  return found;
}

function show(found, main) {
  const data = {}, leftOut = [];
  let room = MAX_RICH;
  for (let [kind, content] of Object.entries(found).slice(0, 32)) {
    kind = kind.slice(0, 100);
    if (content instanceof Uint8Array) content = Buffer.from(content);
    else content = String(content);
    if (kind === "text/plain" && content.length > MAX_TEXT) {
      content = `${content.slice(0, MAX_TEXT)}… (${content.length} characters)`;
    }
    const size = Buffer.byteLength(content);
    if (size > room) leftOut.push(kind);
    else {
      room -= size;
      data[kind] = content;
    }
  }
  send(SHOW, { data, main, left_out: leftOut, waits: false });
}

function failure(error) {
  const isError = error !== null && typeof error === "object" && "message" in error;
  const name = isError ? String(error.name ?? "Error") : "Error";
  const value = isError ? String(error.message) : inspect(error);
  const lines = isError && error.stack ? String(error.stack) : `Uncaught ${value}`;
  const kept = lines.split("\n").filter((line) => !OURS.test(line)).join("\n");
  return {
    code: 1,
    name: name.slice(0, 1000),
    value: value.slice(0, MAX_VALUE),
    traceback: `${kept.slice(0, MAX_STACK)}\n`,
  };
}

function interruption() {
  return { code: INTERRUPTED, name: "Interrupted", value: "", traceback: "Interrupted\n" };
}

// Cells.

function evaluate(code) {
  return new Promise((resolve) => {
    interrupted = () => resolve({ told: interruption() });
    const expression = `${code}\n//# sourceURL=cell-${cell}.js`;
    const begin = () => {
      session.post("Runtime.evaluate", { expression, replMode: true }, (problem, answer) => {
        if (problem) resolve({ told: failure(problem) });
        else if (answer.exceptionDetails) {
          remote(answer.exceptionDetails.exception, (error) => resolve({ told: failure(error) }));
        } else remote(answer.result, (value) => resolve({ value, told: { code: 0 } }));
      });
    };
    try {
      called("begin", begin, (name) => vm.runInThisContext(`${name}()`, { breakOnSigint: true }));
    } catch (error) {
      const isOurs = error?.code === "ERR_SCRIPT_EXECUTION_INTERRUPTED";
      resolve({ told: isOurs ? interruption() : failure(error) });
    }
  });
}

/** Have something under a name that a script sees, for as long as ``work`` takes. */
function called(what, value, work) {
  const name = `__k8e_${what}`;
  Object.defineProperty(globalThis, name, { value, configurable: true });
  try {
    return work(name);
  } finally {
    delete globalThis[name];
  }
}

/** The value itself, of what the inspector has only described. */
function remote(described, take) {
  if (!described.objectId) {
    if (described.unserializableValue) take(vm.runInThisContext(described.unserializableValue));
    else take(described.value);
    return;
  }
  const { objectId } = described;
  called("take", take, (name) => {
    const functionDeclaration = `function () { "use strict"; ${name}(this); }`;
    session.post("Runtime.callFunctionOn", { objectId, functionDeclaration });
  });
  session.post("Runtime.releaseObject", { objectId });
}

async function answer(number, asked) {
  cell = number;
  const before = {};
  for (const [name, value] of Object.entries(asked.env)) {
    before[name] = process.env[name];
    process.env[name] = value;
  }
  let { value, told } = await evaluate(asked.code.toString());
  interrupted = null;
  if (value !== undefined && !told.name) {
    try {
      globalThis._ = value;
      show(described(value), true);
    } catch (error) {
      told = failure(error);
    }
  }
  for (const [name, old] of Object.entries(before)) {
    if (old === undefined) delete process.env[name];
    else process.env[name] = old;
  }
  send(EXIT, told);
}

// The guest's end.

let received = Buffer.alloc(0);
let line = Promise.resolve();

control.on("data", (data) => {
  received = Buffer.concat([received, data]);
  while (received.length >= HEADER_SIZE) {
    const length = received.readUInt32BE(0);
    if (received.length < HEADER_SIZE + length) return;
    const kind = received.readUInt8(4), number = received.readUInt32BE(5);
    const body = received.subarray(HEADER_SIZE, HEADER_SIZE + length);
    received = received.subarray(HEADER_SIZE + length);
    if (kind === CANCEL && number === cell) interrupted?.();
    if (kind === CALL) line = line.then(() => answer(number, unpacked(body)));
  }
});
control.on("end", () => process.exit(0));
// One that waits is stopped by CANCEL. Only one that computes gets a signal: after that one Node
// would, now and then, take it for the next cell's.
process.on("SIGINT", () => {});
process.on("uncaughtException", (error) => console.error(inspect(error)));
process.on("unhandledRejection", (error) => console.error("unhandled rejection:", inspect(error)));

session.connect();
process.argv.splice(1);
globalThis.require = createRequire(`${process.cwd()}/`);
globalThis.display = (value) => show(described(value), false);
globalThis.display.raw = (bundle) => show(bundle, false);
send(HELLO, {});
