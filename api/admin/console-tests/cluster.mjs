// A real cluster for the console's tests: three `quorate serve` with tokens, and emulated engines.

import { execFileSync, spawn } from 'node:child_process';
import { createServer } from 'node:net';
import { mkdtempSync, renameSync, rmSync, writeFileSync, mkdirSync, createWriteStream } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

const QUORATE = process.env.QUORATE ?? new URL('../../target/debug/quorate', import.meta.url).pathname;

/** Ports that were free a moment ago. */
async function freePorts(count) {
  const servers = await Promise.all(Array.from({ length: count }, () => new Promise((resolve) => {
    const server = createServer();
    server.listen(0, '127.0.0.1', () => resolve(server));
  })));
  const ports = servers.map((server) => server.address().port);
  await Promise.all(servers.map((server) => new Promise((resolve) => server.close(resolve))));
  return ports;
}

/** Waits until `condition` answers something, and returns it. */
export async function until(what, condition, timeoutMs = 60_000) {
  const end = Date.now() + timeoutMs;
  for (;;) {
    let fault;
    const found = await Promise.resolve().then(condition).catch((it) => { fault = it; });
    if (found) return found;
    if (Date.now() > end) throw new Error(`timed out waiting until ${what}`, { cause: fault });
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

export class Cluster {
  /** Starts engines and three replicas, and waits until a leader has healthy backends. */
  static async start(options = {}) {
    const cluster = new Cluster();
    try {
      await cluster.begin(options);
    } catch (fault) {
      await cluster.stop();
      throw fault;
    }
    return cluster;
  }

  async begin({ engines = 4, settings = '' }) {
    this.dir = mkdtempSync(join(tmpdir(), 'quorate-console-'));
    this.processes = new Map();
    this.tokens = {};
    const lines = ['viewer', 'operator', 'admin'].map((role) => {
      const out = execFileSync(QUORATE, ['token', 'create', '--role', role, `${role}-1`], { encoding: 'utf8' });
      const told = Object.fromEntries(out.trim().split('\n').map((it) => it.split(/\s+/)));
      this.tokens[role] = told.token;
      return told.line;
    });
    writeFileSync(join(this.dir, 'tokens'), `${lines.join('\n')}\n`, { mode: 0o600 });
    const ports = await freePorts(engines + 9);
    this.engines = ports.splice(0, engines);
    this.engines.forEach((_, at) => this.restartEngine(at + 1));
    const peers = [2, 5, 8].map((at) => `"127.0.0.1:${ports[at]}"`).join(', ');
    this.replicas = [1, 2, 3].map((id) => {
      const [data, admin, peer] = ports.slice(3 * (id - 1), 3 * id);
      const dir = join(this.dir, `replica-${id}`);
      mkdirSync(dir, { mode: 0o700 });
      const backends = this.engines.map((port, at) =>
        `[[backends]]\nid = "engine-${at + 1}"\nurl = "http://127.0.0.1:${port}"\nmodels = ["*"]\n`).join('\n');
      const config = `[node]\nid = ${id}\ndata_dir = "${dir}/data"\n
[listen]\ndata = "127.0.0.1:${data}"\nadmin = "127.0.0.1:${admin}"\npeer = "127.0.0.1:${peer}"\nadvertise = "127.0.0.1"\n
[admin]\ntokens_file = "${join(this.dir, 'tokens')}"\n
[cluster]\npeers = [${peers}]\nbootstrap_expect = 3\n
${settings}\n${backends}`;
      writeFileSync(join(dir, 'quorate.toml'), config);
      return { id, data: `http://127.0.0.1:${data}`, admin: `http://127.0.0.1:${admin}`, config: join(dir, 'quorate.toml') };
    });
    this.replicas.forEach((replica) => this.startReplica(replica.id));
    await until('all replicas are ready', async () => {
      const answers = await Promise.all(this.replicas.map((it) => fetch(`${it.admin}/readyz`)));
      return answers.every((answer) => answer.status === 200);
    });
  }

  startReplica(id) {
    this.run(`replica-${id}`, ['serve', '--config', this.replicas[id - 1].config]);
  }

  restartEngine(number) {
    this.run(`engine-${number}`, [
      'engine', '--listen', `127.0.0.1:${this.engines[number - 1]}`, '--seed', `${number}`, '--num-gpu-blocks', '4096',
      '--speed', number === this.engines.length ? '0.4' : '1',
    ]);
  }

  /** Writes, and once more where a leader was lost meanwhile: what is put twice is put. */
  put(path, body, options) {
    return until(`${path} is put`, () => this.call('PUT', path, body, options), 300_000);
  }

  /** Calls `send` with each number below `count` and a replica, several at a time. */
  async many(count, send) {
    let next = 0;
    const one = async (_, at) => {
      while (next < count) {
        next += 1;
        await send(next - 1, (at % 3) + 1);
      }
    };
    await Promise.all(Array.from({ length: 48 }, one));
  }

  run(name, args) {
    const log = createWriteStream(join(this.dir, `${name}.log`), { flags: 'a' });
    const child = spawn(QUORATE, args, { stdio: ['ignore', 'pipe', 'pipe'] });
    child.stdout.pipe(log);
    child.stderr.pipe(log);
    this.processes.set(name, child);
  }

  /** Kills a process at once, and waits until it is gone. */
  async kill(name) {
    const child = this.processes.get(name);
    this.processes.delete(name);
    const gone = new Promise((resolve) => child.once('exit', resolve));
    child.kill('SIGKILL');
    await gone;
  }

  /** Takes a stopped replica's data directory away, until what it returns is called. */
  loseStore(id) {
    const data = join(this.dir, `replica-${id}`, 'data');
    renameSync(data, `${data}.lost`);
    return () => {
      rmSync(data, { recursive: true, force: true });
      renameSync(`${data}.lost`, data);
    };
  }

  /** Calls the admin API of a replica. */
  async call(method, path, body, { id = 1, role = 'admin' } = {}) {
    const answer = await fetch(`${this.replicas[id - 1].admin}${path}`, {
      method,
      headers: { authorization: `Bearer ${this.tokens[role]}`, 'content-type': 'application/json' },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    const text = await answer.text();
    if (!answer.ok) throw new Error(`${method} ${path}: ${answer.status} ${text}`);
    return text && JSON.parse(text);
  }

  get(path, options) {
    return this.call('GET', path, undefined, options);
  }

  /** Sends one chat, and reads its answer to the end. */
  async chat({ user, text, id = 1, tokens = 16, requestId, session, parent, signal }) {
    const headers = { 'content-type': 'application/json', 'x-quorate-user': user };
    if (requestId) headers['x-request-id'] = requestId;
    if (session) headers['x-quorate-session'] = session;
    if (parent) headers['x-quorate-parent-session'] = parent;
    const answer = await fetch(`${this.replicas[id - 1].data}/v1/chat/completions`, {
      method: 'POST',
      headers,
      signal,
      body: JSON.stringify({
        model: 'emulated', max_tokens: tokens, stream: true, messages: [{ role: 'user', content: text }],
      }),
    });
    return { status: answer.status, text: await answer.text() };
  }

  /** A steady load of users who share some beginnings, until `stop` of what it returns is called. */
  load({ perSecond = 12, users = ['ada', 'bo', 'cleo', 'dan', 'eve', 'finn'], tokens = 24 } = {}) {
    const stop = new AbortController();
    const begins = ['You are a careful assistant for the support desk. ', 'Summarise the ticket below in two lines. ',
      'Translate the following text into French. '].map((it) => it.repeat(40));
    let number = 0;
    const timer = setInterval(() => {
      number += 1;
      const user = users[Math.floor((number * number) / 3) % users.length];
      const text = `${begins[Math.floor(number / 3) % begins.length]}${`Turn ${number % 17} of ${user}. `.repeat(20)}`;
      const id = (number % 3) + 1;
      this.chat({ user, text, id, tokens: tokens + (number % 5) * 8, signal: stop.signal }).catch(() => {});
    }, 1000 / perSecond);
    return () => { clearInterval(timer); stop.abort(); };
  }

  async stop() {
    const gone = [...this.processes.values()].map((child) => new Promise((resolve) => {
      if (child.exitCode !== null || child.signalCode !== null) { resolve(); return; }
      child.once('exit', resolve);
      child.kill('SIGKILL');
    }));
    await Promise.all(gone);
    rmSync(this.dir, { recursive: true, force: true });
  }
}
