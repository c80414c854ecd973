// State shared by all pages: the caller, the replicas every second, their history while the page is
// open, the last events, and whether the replica responds.

import { every, follow, get, hooks } from './api.js';

const KEPT = 180;
const EVENTS_KEPT = 200;

export const live = {
  me: undefined,
  replicas: undefined,
  /** Totals of the cluster, one per second, newest last. */
  history: [],
  /** Requests per second by replica. */
  byReplica: new Map(),
  events: [],
  isLost: false,
  answeredAt: 0,
  listeners: new Set(),
};

/** Calls `listener(what)` after each change until `signal`. */
export function watch(signal, listener) {
  live.listeners.add(listener);
  signal.addEventListener('abort', () => live.listeners.delete(listener));
}

const tell = (what) => live.listeners.forEach((listener) => listener(what));

/** Whether the caller has at least this role. */
export const may = (role) => {
  const order = ['viewer', 'operator', 'admin'];
  return order.indexOf(live.me?.role) >= order.indexOf(role);
};

/** Whether a replica's figures are recent enough to show. */
export const isFresh = (replica) => Boolean(replica.figures) && replica.heard_ms_ago < 5000;

/** What a state of readiness is called, and its tone. */
export const READINESS = { ready: ['Ready', 'good'], degraded: ['Degraded', 'bad'], 'not-ready': ['Not ready', 'bad'] };

/** Sums and worst cases over the replicas with recent figures. */
export function totals(answer) {
  const heard = answer.replicas.filter(isFresh).map((it) => it.figures);
  const sum = (name) => heard.reduce((all, it) => all + (it[name] ?? 0), 0);
  const most = (name) => heard.reduce((all, it) => (it[name] === null || it[name] === undefined ? all : Math.max(all ?? 0, it[name])), null);
  const weighted = (name) => {
    const counted = heard.filter((it) => it[name] !== null && it.requests_per_s > 0);
    const weight = counted.reduce((all, it) => all + it.requests_per_s, 0);
    return weight ? counted.reduce((all, it) => all + it[name] * it.requests_per_s, 0) / weight : most(name);
  };
  const prompt = sum('prompt_tokens');
  const longest = answer.replicas.filter((it) => isFresh(it) && it.figures.longest)
    .map((it) => ({ ...it.figures.longest, replica: it.id })).sort((a, b) => b.waited_ms - a.waited_ms)[0];
  return {
    requests: sum('requests_per_s'), failed: sum('failed_per_s'), waiting: sum('waiting'),
    inFlight: sum('in_flight'), longest,
    ttft50: weighted('ttft_p50_ms'), ttft99: most('ttft_p99_ms'),
    routing50: weighted('routing_p50_ms'), routing99: most('routing_p99_ms'),
    hit: prompt ? sum('cached_tokens') / prompt : null, predicted: prompt ? sum('predicted_tokens') / prompt : null,
    shared: sum('predicted_tokens') ? sum('shared_tokens') / sum('predicted_tokens') : null,
  };
}

function took(answer) {
  live.replicas = answer;
  live.history.push(totals(answer));
  if (live.history.length > KEPT) live.history.shift();
  for (const replica of answer.replicas) {
    const known = live.byReplica.get(replica.id) ?? [];
    known.push(isFresh(replica) ? replica.figures.requests_per_s : null);
    if (known.length > KEPT) known.shift();
    live.byReplica.set(replica.id, known);
  }
  tell('replicas');
}

/** Starts polling, until `signal`. */
export function begin(signal) {
  hooks.onanswer = (isThere) => {
    if (isThere) live.answeredAt = Date.now();
    if (live.isLost === !isThere) return;
    live.isLost = !isThere;
    tell('connection');
  };
  every(1000, signal, async (it) => took(await get('/admin/v1/replicas', it)));
  follow(EVENTS_KEPT, signal, (name, data) => {
    if (name === 'connected') return;
    live.events.unshift(name === 'missed' ? { event: name, at_ms: Date.now(), ...data } : data);
    if (live.events.length > EVENTS_KEPT) live.events.pop();
    tell('event');
    // The missed events may have changed anything.
    if (name === 'missed') refresh();
  });
}

/** Makes all pages reload their data, after a write. */
export const refresh = () => tell('written');
