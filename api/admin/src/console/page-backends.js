// The engines: those that need attention, and the load of each.

import { every, pages } from './api.js';
import { drain, undrain } from './actions.js';
import { meter, setStatus, status } from './charts.js';
import { attr, h, icon, put, swap } from './dom.js';
import { NONE, count, ms, percent, plural, rate, short, value } from './format.js';
import { live, may, watch } from './live.js';
import { table } from './table.js';
import { MODES } from './words.js';

export const title = 'Backends';

const PROMPT_TOKENS = 1000;

/** Predicted time to the first token of an uncached prompt of 1,000 tokens, in ms. */
export function firstTokenMs(it) {
  const learnt = it.service?.learnt;
  if (!learnt?.prefill_ms_per_token) return null;
  const work = learnt.prefill_ms_per_token * (PROMPT_TOKENS + it.in_flight.pending_prefill_tokens);
  return work + learnt.decode_ms_per_request * it.in_flight.cluster + (learnt.first_token_base_ms ?? 0);
}

/** The backends, those that need attention first: `{ id, level, why, of }`; level 0 needs none. */
export function judge(backends) {
  const times = backends.map(firstTokenMs).filter((it) => it !== null).sort((a, b) => a - b);
  const median = times[Math.floor((times.length - 1) / 2)];
  const judged = backends.map((it) => {
    const first = firstTokenMs(it);
    const limit = it.service?.limit;
    const rank = (level, word, why, more = 0) => ({ id: it.id, level, word, why, more, first: level === 4 ? null : first, of: it });
    if (it.state.is_draining) return rank(1, 'Draining', 'Draining: takes no new requests');
    if (!it.state.is_healthy) return rank(4, 'Not healthy', `Not healthy: ${it.state.detail ?? 'not probed yet'}`);
    if (it.circuit.is_open) return rank(4, 'Circuit open', 'Circuit open: requests failed one after the other');
    if (it.service?.accuracy?.is_off) return rank(3, 'Mispredicted', `Predicted cache hits are off by ${percent(Math.abs(it.service.accuracy.error_percent) / 100)} of the prompt tokens`);
    if (limit && it.in_flight.cluster >= limit) return rank(2, 'At limit', `At its limit of ${count(limit)} requests`, first ?? 0);
    if (it.ownership.mode === 'degraded') return rank(2, 'KV events late', `Ownership degraded: ${it.ownership.reason}`);
    if (first !== null && times.length > 1 && first > 1.5 * median) return rank(2, 'Slow', `Slow: first token of 1,000 tokens predicted after ${ms(first)}, ${(first / median).toFixed(1)} times the median`, first);
    return rank(0, 'Healthy', '', first ?? 0);
  });
  return judged.sort((a, b) => b.level - a.level || b.more - a.more || a.id.localeCompare(b.id, 'en', { numeric: true }));
}

const KINDS = ['good', 'wait', 'warn', 'warn', 'bad'];

function stateCell() {
  const node = status('wait', '');
  return { node, update: (row) => setStatus(node, KINDS[row.level], row.word) };
}

const bar = (read, kind) => () => {
  const it = meter(kind);
  return { node: it.node, update: (row) => it.set(...read(row.of)) };
};

/** Time over which rates are measured, in ms. */
const WINDOW_MS = 15_000;

/** Counters of each backend while the page is open, for its rates: the oldest and the newest of a window. */
class Rates {
  seen = new Map();

  take(backends) {
    const at = performance.now();
    for (const it of backends) {
      const counters = { at, answers: it.answers.all, failed: it.answers.server_errors + it.probes.failures_total, queried: it.engine.prefix_queried_tokens, hit: it.engine.prefix_hit_tokens };
      const kept = (this.seen.get(it.id) ?? []).filter((one) => at - one.at < WINDOW_MS && one.answers <= counters.answers && one.queried <= counters.queried);
      this.seen.set(it.id, [...kept, counters]);
    }
  }

  /** Requests and failures per second through this replica, and the share of prompt tokens that the engine had cached. */
  of(it) {
    const all = this.seen.get(it.id) ?? [];
    const [first, last] = [all[0], all[all.length - 1]];
    if (!first || first === last) return { requests: null, failed: null, hit: it.engine.prefix_queried_tokens ? it.engine.prefix_hit_tokens / it.engine.prefix_queried_tokens : null };
    const seconds = (last.at - first.at) / 1000;
    const queried = last.queried - first.queried;
    const hit = queried ? (last.hit - first.hit) / queried : last.queried ? last.hit / last.queried : null;
    return { requests: (last.answers - first.answers) / seconds, failed: (last.failed - first.failed) / seconds, hit };
  }
}

const columns = (open) => [
  { title: 'Backend', head: true, by: (row) => row.id, make: () => {
    const button = h('button', { type: 'button', class: 'link', onclick: () => open(button.row) });
    return { node: button, update: (row) => { button.row = row.id; put(button, row.id); } };
  } },
  { title: 'State', by: (row) => row.level * 1e9 + row.more, down: true, make: stateCell },
  { title: 'In flight', by: (row) => row.of.in_flight.cluster, number: true, make: bar((it) => {
    const limit = it.service?.limit;
    const all = it.in_flight.cluster;
    return [limit ? all / limit : 0, limit ? `${count(all)} / ${count(limit)}` : count(all), limit && all >= limit];
  }) },
  { title: 'Queue', wide: true, by: (row) => row.of.engine.waiting, number: true, text: (row) => count(row.of.engine.waiting) },
  { title: 'Req/s', wide: true, by: (row) => row.rates.requests, number: true, text: (row) => rate(row.rates.requests) },
  { title: 'Failed/s', wide: true, by: (row) => row.rates.failed, number: true, text: (row) => rate(row.rates.failed) },
  { title: 'Hit rate', wide: true, by: (row) => row.rates.hit, number: true, text: (row) => percent(row.rates.hit) },
  { title: 'KV used', wider: true, by: (row) => row.of.engine.kv_usage_percent, number: true, text: (row) => percent(row.of.engine.kv_usage_percent / 100) },
  { title: 'Owned blocks', wider: true, by: (row) => row.of.owned_blocks, number: true, text: (row) => (row.of.capacity.blocks ? `${short(row.of.owned_blocks)} / ${short(row.of.capacity.blocks)}` : short(row.of.owned_blocks)) },
  { title: 'TTFT of 1,000', wider: true, by: (row) => row.first, number: true, text: (row) => ms(row.first) },
  { title: 'Address', wider: true, by: (row) => row.of.url, text: (row) => row.of.url.replace(/^https?:\/\/|\/$/g, '') },
];

/** Number of findings that are spelled out. */
const FINDINGS = 6;

/** The findings, each with its backends. Backends with the same finding share a line. */
function showFindings(root, judged) {
  const alike = new Map();
  judged.filter((it) => it.why).forEach((it) => alike.set(it.why, [...(alike.get(it.why) ?? []), it]));
  const lines = [...alike].map(([why, of]) => ({ why, kind: KINDS[of[0].level], names: `${of.slice(0, 8).map((it) => it.id).join(', ')}${of.length > 8 ? ` and ${of.length - 8} more` : ''}` }));
  root.hidden = !lines.length;
  const shown = lines.slice(0, FINDINGS).map((it) => h('li', null, status(it.kind, it.names), h('span', null, it.why)));
  const text = lines.map((it) => `${it.names}${it.why}`).join();
  if (root.text === text) return;
  root.text = text;
  swap(root, shown, lines.length > FINDINGS && h('li', { class: 'note' }, `and ${plural(lines.length - FINDINGS, 'more finding')}: see the backends’ pages`));
}

export function mount(root, signal, [wanted]) {
  let all = [];
  let open = wanted;
  const summary = h('p', { class: 'note', role: 'status' }, 'Reading the backends …');
  const filter = h('input', { type: 'search', id: 'filter', placeholder: 'Id, model, label, state', autocomplete: 'off', oninput: () => show() });
  const grid = table({ label: 'Backends', columns: columns((id) => { open = id; history.replaceState(null, '', `#/backends/${encodeURIComponent(id)}`); show(); detail.querySelector('button')?.focus(); }), key: (row) => row.id, sort: { at: 1, down: true }, empty: 'No backend fits.' });
  const detail = h('aside', { class: 'card detail', 'aria-label': 'Backend', hidden: true });
  const findings = h('ul', { class: 'card findings', 'aria-label': 'Findings' });
  const rates = new Rates();
  swap(root, findings, h('div', { class: 'row tools' }, h('label', { for: 'filter', class: 'hidden' }, 'Filter'), filter, summary), h('div', { class: 'split' }, grid.node, detail));

  function show() {
    const text = filter.value.trim().toLowerCase();
    const judged = judge(all).map((it) => ({ ...it, rates: rates.of(it.of) }));
    showFindings(findings, judged);
    const fits = (it) => !text || [it.id, it.of.state.name, it.why, it.of.url, ...it.of.models, ...(it.of.facts.models ?? []), ...Object.entries(it.of.labels).flat()].join(' ').toLowerCase().includes(text);
    const rows = judged.filter(fits);
    grid.set(rows);
    const well = judged.filter((it) => it.level === 0).length;
    put(summary, all.length ? `${count(all.length)} registered, ${count(well)} healthy${rows.length < all.length ? `, ${count(rows.length)} shown` : ''}. Rates are those of the requests through replica ${live.me.replica}; TTFT is predicted, for 1,000 tokens that are not cached.` : 'No backend is registered. PUT /admin/v1/backends/ID adds one.');
    const row = judged.find((it) => it.id === open);
    detail.hidden = !row;
    if (row) showDetail(detail, row, () => { open = undefined; history.replaceState(null, '', '#/backends'); show(); });
  }

  const look = async () => {
    const found = [];
    await pages('/admin/v1/backends', (page) => found.push(...page.backends), signal);
    all = found;
    rates.take(all);
    show();
  };
  const failed = (fault) => { if (!all.length) put(summary, fault.message); };
  every(2000, signal, async () => {
    await look();
    // Poll less often if the response is large.
    if (all.length > 64) await new Promise((resolve) => { setTimeout(resolve, 3000); });
  }, failed);
  watch(signal, (what) => { if (what === 'written') look().catch(failed); });
}

function showDetail(root, row, close) {
  const it = row.of;
  const accuracy = it.service?.accuracy;
  const rows = [
    ['Address', it.url], ['Engine', [it.engine_info.kind, it.engine_info.version].filter(Boolean).join(' ') || NONE],
    ['Models', (it.facts.models ?? it.models).join(', ')], ['Role', it.role === 'both' ? 'Whole requests' : it.role],
    ['In flight', `${count(it.in_flight.cluster)} in all, ${count(it.in_flight.here)} from replica ${live.me.replica}`],
    ['Limit', it.service?.limit ? `${count(it.service.limit)} (cache allows ${value(it.service.limits?.b_mem)}, time between tokens ${value(it.service.limits?.b_sla)})` : 'None'],
    ['In the engine', `${count(it.engine.running)} running, ${count(it.engine.waiting)} waiting`],
    ['Owned blocks', `${count(it.owned_blocks)} of ${count(it.capacity.blocks)}`],
    ['Ownership', `${MODES[it.ownership.mode]?.[0]}. ${it.ownership.reason ?? MODES[it.ownership.mode]?.[1]}`],
    ['KV events read by', it.ownership.reader ? `Replica ${it.ownership.reader}` : NONE],
    ['Predicted cached', accuracy ? `${count(accuracy.predicted_tokens)} of ${count(accuracy.prompt_tokens)} tokens` : NONE],
    ['Reported cached', accuracy ? `${count(accuracy.cached_tokens)} tokens` : NONE],
    ['Predicted TTFT', row.first === null ? 'Not learned yet' : `${ms(row.first)} for 1,000 uncached tokens`],
    ['Prediction error', accuracy ? `${accuracy.error_percent > 0 ? '+' : ''}${accuracy.error_percent.toFixed(1)} % of the prompt tokens` : NONE],
    ['Answers here', `${count(it.answers.all)}, ${count(it.answers.client_errors)} with 4xx, ${count(it.answers.server_errors)} with 5xx`],
    ['Circuit', it.circuit.is_open ? `Open for ${ms(it.circuit.pause_ms)}` : `Closed, ${count(it.circuit.recent_failures)} recent failures`],
    ['Probes', `${count(it.probes.total)}, ${count(it.probes.failures_total)} failed`],
    ['From', it.discovered ? `Source ${it.discovered.source}` : 'Operator or config'],
  ];
  if (root.shown !== it.id) {
    root.shown = it.id;
    root.cells = rows.map(() => h('dd'));
    root.state = status('wait', '');
    root.why = h('p');
    root.tools = h('div', { class: 'row' });
    swap(root, h('header', { class: 'row' }, h('h2', null, it.id), root.state, h('span', { class: 'grow' }), h('button', { type: 'button', class: 'plain', 'aria-label': 'Close', onclick: close }, icon('close'))),
      root.why, root.tools, h('dl', { class: 'figures' }, rows.map(([name], at) => h('div', null, h('dt', null, name), root.cells[at]))));
  }
  rows.forEach(([, text], at) => put(root.cells[at], text));
  setStatus(root.state, KINDS[row.level], row.word);
  put(root.why, row.why);
  root.why.hidden = !row.why;
  const wanted = may('operator') ? (it.state.is_draining ? 'undrain' : 'drain') : '';
  if (root.tools.dataset.has !== `${it.id} ${wanted}`) {
    root.tools.dataset.has = `${it.id} ${wanted}`;
    const button = wanted === 'undrain' ? h('button', { type: 'button', onclick: () => undrain(it.id) }, 'Undrain …')
      : h('button', { type: 'button', onclick: () => drain(it.id, root.running) }, 'Drain …');
    swap(root.tools, wanted && button, h('a', { class: 'button', href: `#/decisions/?backend=${encodeURIComponent(it.id)}` }, 'Its decisions'));
  }
  root.running = it.in_flight.cluster;
  attr(root, 'aria-label', `Backend ${it.id}`);
}
