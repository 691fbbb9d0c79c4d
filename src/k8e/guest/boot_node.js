'use strict';
// What a warm Node.js runs first, by --require; Node itself does the rest.
//
// It was started on an empty program (-e). Node compiles a wrapper for that, by a method that can be
// replaced, and calls what it gets. For that moment the method is ours: it waits for code, and
// gives Node a function that runs it. What is on the stack then are Node's own frames, and two in
// the place of two of Node's, with their names and lines; so traces are those of `node -e`.
//
// It talks to the guest by a socket, as boot.py does: `r` is ready, `b` begins, `n` is not me.

const Module = require('module');

const told = process.env.K8E_BOOT;
forget();
// Threads of a program load this, too, since they have the options of the process.
if (told !== undefined) {
  if (process.versions.node.startsWith('20.')) {
    standIn(Number(told));
  } else {
    process.reallyExit(3);
  }
}

function forget() {
  delete require.cache[__filename];
  for (const key of Object.keys(Module._pathCache)) {
    if (Module._pathCache[key] === __filename) {
      delete Module._pathCache[key];
    }
  }
}

function standIn(control) {
  const fs = require('fs');
  const path = require('path');
  const vm = require('vm');
  const original = Module.prototype._compile;
  const makeRunner = imitate(vm);

  Module.prototype._compile = function (wrapper, name) {
    Module.prototype._compile = original;
    fs.writeSync(control, 'r\n');
    const script = prepare(this);
    const compiled = original.call(this, wrapper, name);
    readExactly(1);
    try {
      fs.writeSync(control, 'b');
    } catch {
      // The guest has waited long, found that byte taken, and hung up: it is our program.
    }
    fs.closeSync(control);
    /^/.exec(''); // as Node does, so that a program finds nothing of ours in RegExp.lastMatch
    return compiled.bind(undefined, makeRunner(script));
  };

  function prepare(evaluated) {
    const size = readExactly(4).readUInt32BE();
    const [cwd, code, ...pairs] = readExactly(size).toString('utf8').split('\0');
    let script;
    try {
      script = new vm.Script(code, {
        filename: '[eval]',
        importModuleDynamically: vm.constants.USE_MAIN_CONTEXT_DEFAULT_LOADER,
      });
      process.chdir(cwd);
    } catch {
      fs.writeSync(control, 'n'); // a new one has the right words for it
      process.reallyExit(1);
    }
    setEnvironment(pairs);
    evaluated.filename = path.join(cwd, '[eval]');
    evaluated.paths = Module._nodeModulePaths(cwd);
    process.execArgv[1] = code;
    Object.defineProperty(process, '_eval', { value: code });
    return script;
  }

  function readExactly(size) {
    const data = Buffer.allocUnsafeSlow(size);
    for (let at = 0; at < size; ) {
      const count = fs.readSync(control, data, at, size - at);
      if (count === 0) {
        process.reallyExit(1);
      }
      at += count;
    }
    return data;
  }
}

// Have these variables and no others, in this order.
function setEnvironment(pairs) {
  for (const name of Object.keys(process.env)) {
    delete process.env[name];
  }
  for (const pair of pairs) {
    const end = pair.indexOf('=');
    process.env[pair.slice(0, end)] = pair.slice(end + 1);
  }
}

// Functions that run a script as Node's own do, and that a trace does not tell from those.
function imitate(vm) {
  const { runInContext } = Object.getPrototypeOf(vm.Script.prototype);
  const natives = process.binding('natives');
  const run = imitation(
    vm,
    natives,
    'internal/vm',
    '  return ReflectApply(\n    runInContext,\n    script,',
    'return function runScriptInThisContext(script, displayErrors, breakOnFirstLine) {',
    'ReflectApply(runInContext, script, [null, -1, displayErrors, false, breakOnFirstLine])',
    '}',
  )(Reflect.apply, runInContext);
  return imitation(
    vm,
    natives,
    'internal/process/execution',
    '      return runScriptInThisContext(script, true, !!breakFirstLine)',
    'return (script) => () => {',
    'runScriptInThisContext(script, true, false)',
    '}',
  )(run);
}

// A function with a call at the place where `original` has it in a file of Node's.
function imitation(vm, natives, file, original, before, call, after) {
  const at = natives[file].indexOf(original) + original.indexOf('return ');
  const lines = natives[file].slice(0, at).split('\n');
  if (at < 0 || natives[file].indexOf(original) < 0) {
    process.reallyExit(3);
  }
  const names = file === 'internal/vm' ? 'ReflectApply, runInContext' : 'runScriptInThisContext';
  const source =
    `(function (${names}) { 'use strict'; ${before}` +
    `${'\n'.repeat(lines.length - 1)}${' '.repeat(lines.at(-1).length)}return ${call};${after}})`;
  return new vm.Script(source, { filename: `node:${file}` }).runInThisContext();
}
