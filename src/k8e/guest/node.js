// The program of a Node context: takes cells of code, runs them in one scope, tells results.
//
// What it says, and to whom, is in kernel.py. V8's own way for consoles (`replMode`) lets a cell
// await, and declare again what an earlier one declared.
//
// Two threads: the main one runs cells, the other one listens to the guest, also while a cell
// computes. Only that thread signals this process, and only while V8 stops a cell for a signal: at
// any other moment, SIGINT would end Node, or be taken for the next cell's.
"use strict";

const { Session } = require("inspector");
const { createRequire } = require("module");
const { Socket } = require("net");
const { inspect } = require("util");
const vm = require("vm");
const { Worker, isMainThread, parentPort, workerData } = require("worker_threads");

const CALL = 1, CANCEL = 5, EXIT = 20, SHOW = 21, HELLO = 32;
const HEADER_SIZE = 9;
const MAX_TEXT = 1 << 20, MAX_RICH = 6 << 20, MAX_VALUE = 16 << 10, MAX_STACK = 64 << 10;
const INTERRUPTED = 130;
const OURS = /node:|\/kernels[-/]|evalmachine|new Promise \(<anonymous>\)/; // frames below a cell

// Numbers of cells, which both threads share: the one that computes, negative as soon as it gets a
// signal, and the last one that the guest wants to stop. Each thread writes its own before it reads
// the other's, so that at least one of the two stops the cell.
const COMPUTING = 0, CANCELLED = 1;
const PATIENCE = 50; // milliseconds that a cell which is to be stopped goes on
const shared = isMainThread ? new Int32Array(new SharedArrayBuffer(8)) : workerData.shared;

let control; // the socket of the guest
let session; // of V8's inspector, for this very thread
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
    const compute = () => {
      if (Atomics.load(shared, CANCELLED) === cell) return resolve({ told: interruption() });
      session.post("Runtime.evaluate", { expression, replMode: true }, (problem, answer) => {
        if (problem) resolve({ told: failure(problem) });
        else if (answer.exceptionDetails) {
          remote(answer.exceptionDetails.exception, (error) => resolve({ told: failure(error) }));
        } else remote(answer.result, (value) => resolve({ value, told: { code: 0 } }));
      });
    };
    const begin = () => {
      Atomics.store(shared, COMPUTING, cell);
      try {
        compute();
      } finally {
        // A signal that is on its way must find this cell.
        if (Atomics.compareExchange(shared, COMPUTING, cell, 0) !== cell) for (;;);
      }
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

/** The thread that listens: hands on what the guest says, and stops the cell that computes. */
function listen() {
  let received = Buffer.alloc(0);
  const source = new Socket({ fd: workerData.descriptor, readable: true, writable: false });
  source.on("data", (data) => {
    received = Buffer.concat([received, data]);
    const frames = [];
    while (received.length >= HEADER_SIZE) {
      const length = received.readUInt32BE(0);
      if (received.length < HEADER_SIZE + length) break;
      const kind = received.readUInt8(4), number = received.readUInt32BE(5);
      const body = Uint8Array.from(received.subarray(HEADER_SIZE, HEADER_SIZE + length));
      received = received.subarray(HEADER_SIZE + length);
      frames.push({ kind, number, body });
    }
    // First, so that a cell which comes with its own interrupt does not begin.
    for (const { kind, number } of frames) if (kind === CANCEL) cancel(number);
    for (const frame of frames) parentPort.postMessage(frame);
  });
  source.on("close", () => parentPort.postMessage({ kind: EXIT }));
}

function cancel(number) {
  Atomics.store(shared, CANCELLED, number);
  // A cell that has just printed may still be in Node's own code, which does not take it well when
  // it is stopped half-way.
  setTimeout(() => {
    const computing = Atomics.compareExchange(shared, COMPUTING, number, -number);
    if (computing === number) process.kill(process.pid, "SIGINT");
  }, PATIENCE);
}

function serve() {
  const descriptor = Number(process.argv[2]);
  let line = Promise.resolve();
  control = new Socket({ fd: descriptor, readable: false, writable: true });
  // Its own environment: what the session has in NODE_OPTIONS is for the code that runs here.
  const options = { workerData: { shared, descriptor }, env: {}, execArgv: [], argv: [] };
  const listener = new Worker(__filename, options);
  listener.on("message", ({ kind, number, body }) => {
    if (kind === EXIT) process.exit(0);
    if (kind === CANCEL && number === cell) interrupted?.();
    if (kind === CALL) line = line.then(() => answer(number, unpacked(Buffer.from(body))));
  });
  listener.on("exit", () => process.exit(1));
  process.on("SIGINT", () => {}); // from elsewhere: not for us
  process.on("uncaughtException", (error) => console.error(inspect(error)));
  process.on("unhandledRejection", (error) =>
    console.error("unhandled rejection:", inspect(error)),
  );

  session = new Session();
  session.connect();
  process.argv.splice(1);
  globalThis.require = createRequire(`${process.cwd()}/`);
  globalThis.display = (value) => show(described(value), false);
  globalThis.display.raw = (bundle) => show(bundle, false);
  send(HELLO, {});
}

if (isMainThread) serve();
else listen();
