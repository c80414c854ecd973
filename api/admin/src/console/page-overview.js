// The overview for operators.

import { every, get, pages } from './api.js';
import { lines, setStatus, status } from './charts.js';
import { attr, h, keyed, put, swap } from './dom.js';
import { NONE, bytes, count, duration, ms, percent, plural, rate, time } from './format.js';
import { isFresh, live, totals, watch } from './live.js';
import { OUTCOMES, ROLES, event } from './words.js';
import { judge } from './page-backends.js';

export const title = 'Overview';

/** Number of failed requests whose reasons are counted. */
const FAILURES = 100;

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? '' : '.'}`;
const share = (part, whole) => `${bytes(part)}, ${percent(part / whole)}`;

/** What the replicas tell of themselves that the asked one's readiness does not contain. */
function troubles(answer) {
  const alike = new Map();
  for (const it of answer.replicas) {
    const say = (text) => alike.set(text, [...(alike.get(text) ?? []), it.id]);
    const figures = it.figures;
    if (it.digest && !it.digest.is_equal) say(`had another state at index ${it.digest.index}`);
    if (!figures || !it.is_connected) continue;
    if (it.lag > 1000) say(`is ${count(it.lag)} entries behind`);
    if (figures.disk_size_bytes && figures.disk_free_bytes / figures.disk_size_bytes < 0.03) say(`has ${percent(figures.disk_free_bytes / figures.disk_size_bytes)} of its disk free`);
    if (it.is_asked) continue;
    if (figures.is_minority) say('holds another state than most voters, and fetches theirs');
    if (figures.has_fault) say('has a storage fault');
    if (figures.is_log_waiting) say('waits to write its log, for example for disk space');
    if (!figures.is_ready) say('takes no traffic');
  }
  return [...alike].map(([text, ids]) => (ids.length > 1 ? `Replicas ${ids.join(', ')}: each ${text}.` : `Replica ${ids[0]} ${text}.`));
}

/** The share of requests that fail; 0 while few do. */
export function failing(answer) {
  const { requests, failed } = totals(answer);
  return failed > 0.1 && failed > requests / 100 ? failed / requests : 0;
}

/** The cluster's condition: its tone, one sentence, and what leads to it. `why` says why requests fail. */
export function condition(answer, why = '') {
  const { readiness } = answer;
  const isReady = readiness.status === 'ready';
  const fails = failing(answer);
  const found = [...readiness.reasons, ...(readiness.warnings ?? [])].map(sentence);
  found.push(...troubles(answer));
  const failure = `${percent(fails)} of the requests fail.`;
  if (fails) found.unshift(...(isReady ? [] : [failure]), ...(why ? [why] : []));
  const isBad = !isReady || fails > 0 || answer.replicas.some((it) => !it.is_connected || (it.digest && !it.digest.is_equal));
  const all = answer.replicas.length;
  const there = answer.replicas.filter((it) => it.is_connected).length;
  const word = readiness.status.replace('-', ' ');
  const head = !isReady ? `Replica ${answer.asked} is ${word}${readiness.consequence ? `: ${readiness.consequence}` : ''}.`
    : fails ? failure
      : found.length ? `${there} of ${all} replicas answer.` : `All is well: ${all} of ${all} replicas answer, and a quorum agrees.`;
  return { kind: isBad ? 'bad' : found.length ? 'warn' : 'good', head, found };
}

/** Why requests failed lately, the most frequent reason first. */
function reasons(failed) {
  const counts = new Map();
  for (const { end } of failed) {
    if (!end) continue;
    const text = [end.status, end.code ?? OUTCOMES[end.outcome] ?? end.outcome].filter(Boolean).join(' ');
    counts.set(text, (counts.get(text) ?? 0) + 1);
  }
  const all = [...counts].sort((a, b) => b[1] - a[1]);
  return all.length ? `Of the last ${plural(failed.length, 'failure')}: ${all.slice(0, 3).map(([text, number]) => `${number} × ${text}`).join(', ')}${all.length > 3 ? ' and others' : ''}.` : '';
}

/** State of a replica, by its digest. */
function stateOf(it) {
  if (it.digest) return it.digest.is_equal ? 'Agrees' : `Differs at ${count(it.digest.index)}`;
  const compared = live.replicas.replicas.filter((other) => other.digest);
  if (!it.is_asked || !compared.length) return 'Not compared';
  return compared.every((other) => other.digest.is_equal) ? 'Agrees' : 'Differs';
}

/** Figures of a replica: name, value, and whether it is shown even if all replicas have the same. */
const FIGURES = [
  ['Requests/s', (it) => rate(it.figures.requests_per_s), true],
  ['Failed/s', (it) => rate(it.figures.failed_per_s)],
  ['TTFT p50', (it) => ms(it.figures.ttft_p50_ms), true],
  ['TTFT p99', (it) => ms(it.figures.ttft_p99_ms), true],
  ['Hit rate', (it) => (it.figures.prompt_tokens ? percent(it.figures.cached_tokens / it.figures.prompt_tokens) : NONE), true],
  ['Queue', (it) => count(it.figures.waiting)],
  ['In flight', (it) => count(it.figures.in_flight)],
  ['Streams continued', (it) => count(it.figures.streams_continued)],
  ['Streams lost', (it) => count(it.figures.streams_lost)],
  ['Routing p50', (it) => ms(it.figures.routing_p50_ms)],
  ['State', stateOf],
  ['Applied index', (it) => count(it.figures.applied_index)],
  ['Lag', (it) => (it.lag === null ? NONE : plural(it.lag, 'entry', 'entries'))],
  ['Quorum', (it) => (it.figures.has_quorum ? 'Yes' : 'No')],
  ['Log', (it) => (it.figures.has_fault ? 'Fault' : it.figures.is_log_waiting ? 'Blocked' : it.figures.outbox_items > 500 ? `${count(it.figures.outbox_items)} to write` : 'Writable')],
  ['Snapshot', (it) => (it.figures.snapshot_index === null ? 'None yet' : count(it.figures.snapshot_index))],
  ['Disk free', (it) => (it.figures.disk_size_bytes ? share(it.figures.disk_free_bytes, it.figures.disk_size_bytes) : NONE)],
  ['Uptime', (it) => duration(it.figures.uptime_s)],
  ['Version', (it) => it.version ?? NONE],
];

const isThere = (it) => it.is_connected && isFresh(it);

/** The replicas side by side. Figures that all of them share are folded into one line. */
function replicaTable() {
  const head = h('tr');
  const charts = h('tr', null, h('th', { scope: 'row' }, 'Requests/s'));
  const body = h('tbody');
  const alike = h('dl', { class: 'figures wide-figures' });
  const summary = h('summary');
  const folded = h('details', { class: 'card' }, summary, alike);
  const table = h('div', { class: 'flow', tabindex: '0', role: 'region', 'aria-label': 'Replicas' }, h('table', { class: 'plain-table replicas' }, h('caption', { class: 'hidden' }, 'Replicas'), h('thead', null, head), body));
  const node = h('div', { class: 'cards' }, table, folded);
  let columns = [];
  const rows = FIGURES.map(([name, read, isAlways]) => ({ name, read, isAlways, node: h('tr', null, h('th', { scope: 'row' }, name)), cells: [] }));

  function build(replicas) {
    columns = replicas.map((it) => {
      const state = status('wait', '');
      const facts = h('p', { class: 'note' });
      const chart = lines(`Requests per second of replica ${it.id}`, ['line-a'], rate);
      return { id: it.id, state, facts, chart, th: h('th', { scope: 'col', class: 'replica' }, h('h3', null, `Replica ${it.id}`), state, facts) };
    });
    swap(head, h('td', null, h('span', { class: 'hidden' }, 'Figure')), columns.map((it) => it.th));
    swap(charts, charts.firstChild, columns.map((it) => h('td', null, it.chart.node)));
    charts.firstChild.textContent = 'Last minutes';
    rows.forEach((row) => { row.cells = columns.map(() => h('td', { class: 'num' })); swap(row.node, row.node.firstChild, row.cells); });
    swap(body, charts, rows.map((it) => it.node));
  }

  node.show = (replicas) => {
    if (columns.map((it) => it.id).join() !== replicas.map((it) => it.id).join()) build(replicas);
    replicas.forEach((it, at) => showHead(columns[at], it));
    const there = replicas.filter(isThere);
    const same = [];
    for (const row of rows) {
      const texts = replicas.map((it) => (isThere(it) ? row.read(it) : NONE));
      const values = new Set(replicas.flatMap((it, at) => (isThere(it) ? [texts[at]] : [])));
      const isFolded = !row.isAlways && values.size === 1;
      row.node.hidden = isFolded;
      if (isFolded) same.push([row.name, [...values][0]]);
      row.cells.forEach((cell, at) => {
        put(cell, texts[at]);
        cell.classList.toggle('fault', texts[at].startsWith('Differs') || texts[at] === 'Fault');
      });
    }
    folded.hidden = !same.length;
    put(summary, `${plural(same.length, 'figure')} alike at ${there.length === replicas.length ? 'all' : 'all connected'} replicas`);
    keyed(alike, same, ([name]) => name, ([name]) => h('div', null, h('dt', null, name), h('dd')), (it, [, text]) => put(it.lastChild, text));
    node.parentElement.hidden = !replicas.length;
  };
  return node;
}

function showHead(column, it) {
  const role = ROLES[it.figures?.role] ?? (it.is_voter ? 'Follower' : 'Learner');
  if (!it.is_connected) setStatus(column.state, 'bad', it.is_refusing ? 'Stopped' : 'Not connected');
  else if (it.is_leader) setStatus(column.state, 'lead', 'Leader');
  else setStatus(column.state, !it.figures || (it.figures.is_ready && it.figures.has_quorum) ? 'good' : 'warn', role === 'Leader' ? 'Follower' : role);
  column.th.classList.toggle('is-leader', it.is_leader);
  const parts = [!it.is_voter && 'no vote', it.is_asked && 'this page', it.silent_ms !== null && `silent for ${duration(it.silent_ms / 1000)}`];
  put(column.facts, parts.filter(Boolean).join(' · '));
  column.chart.draw([live.byReplica.get(it.id) ?? []], 1);
}

function tile(name, what, href) {
  const big = h('strong');
  const small = h('span', { class: 'note' });
  const node = h(href ? 'a' : 'div', { class: 'card tile', href }, h('span', { class: 'name' }, name), big, small);
  node.show = (value, note, kind = '') => { put(big, value); put(small, note ?? what); attr(big, 'class', kind); };
  return node;
}

function chartTile(name, note, format, classes, read, show) {
  const number = h('strong', { class: 'num' });
  const side = h('span', { class: 'note' });
  const chart = lines(name, classes, format);
  const node = h('div', { class: 'card chart' }, h('span', { class: 'name' }, name), h('div', { class: 'row' }, number, side), chart.node, h('span', { class: 'note' }, note));
  node.show = (history) => {
    const now = history[history.length - 1];
    const [value, second] = show(now);
    put(number, value);
    put(side, second ?? '');
    chart.draw(read(history));
  };
  return node;
}

const MAIN_CHARTS = () => [
  chartTile('Requests/s', 'Ended in the last 10 s, all replicas', rate, ['line-a'], (all) => [all.map((it) => it.requests)], (it) => [rate(it.requests), it.failed ? `${rate(it.failed)} failed` : 'none failed']),
  chartTile('Time to first token, p50', 'Of streams; thin line: p99', ms, ['line-a', 'line-b'], (all) => [all.map((it) => it.ttft50), all.map((it) => it.ttft99)], (it) => [ms(it.ttft50), `p99 ${ms(it.ttft99)}`]),
  chartTile('Prefix hit rate', 'Prompt tokens that engines had cached; thin line: predicted', percent, ['line-a', 'line-b'], (all) => [all.map((it) => it.hit), all.map((it) => it.predicted)], (it) => [percent(it.hit), `predicted ${percent(it.predicted)}`]),
  chartTile('Queue', 'Requests that wait for a backend with room', count, ['line-a'], (all) => [all.map((it) => it.waiting)], (it) => [count(it.waiting), `${count(it.inFlight)} in flight`]),
];

const MORE_CHARTS = () => [
  chartTile('Known from other replicas', 'Share of the predicted tokens that came from peers, or from before a restart', percent, ['line-a'], (all) => [all.map((it) => it.shared)], (it) => [percent(it.shared)]),
  chartTile('Routing time, p50', 'Added to a request, without its time in the queue; thin line: p99', ms, ['line-a', 'line-b'], (all) => [all.map((it) => it.routing50), all.map((it) => it.routing99)], (it) => [ms(it.routing50), `p99 ${ms(it.routing99)}`]),
];

/** The tile that tells whether replicas hold the same state, as far as it can be compared now. */
function showState(agree, answer) {
  const compared = answer.replicas.filter((it) => it.digest);
  const differ = compared.filter((it) => !it.digest.is_equal);
  const others = answer.replicas.filter((it) => !it.is_asked);
  if (differ.length) agree.show('Differs', `Replica ${differ.map((it) => it.id).join(', ')} at index ${count(differ[0].digest.index)}`, 'fault');
  else if (compared.length) agree.show('Equal', `Digests of ${compared.length + 1} of ${answer.replicas.length} replicas, last at index ${count(Math.max(...compared.map((it) => it.digest.index)))}`);
  else agree.show(NONE, others.some((it) => it.is_connected) ? 'Not compared yet' : others.length ? 'No other replica answers' : 'No other replica is known');
}

export function mount(root, signal) {
  const headline = h('strong');
  const list = h('ul', { class: 'reasons' });
  const banner = h('div', { class: 'banner', role: 'status' }, headline, list);
  const leader = tile('Leader', '', '#/log');
  const worst = tile('Worst backend', '', '#/backends');
  const longest = tile('Longest wait', '', '#/users');
  const agree = tile('State', '');
  const [charts, more] = [MAIN_CHARTS(), MORE_CHARTS()];
  const replicas = replicaTable();
  const events = h('ul', { class: 'events' });
  swap(root, banner, h('section', { class: 'cards charts', 'aria-label': 'Load' }, charts), h('section', { class: 'cards tiles', 'aria-label': 'At a glance' }, leader, worst, longest, agree),
    h('section', null, h('h2', null, 'Latest events'), events),
    h('section', null, h('h2', null, 'Replicas'), replicas),
    h('section', null, h('h2', null, 'Router'), h('div', { class: 'cards charts' }, more)));

  /** Backends that cannot take their share of requests. */
  let sick = [];
  let why = '';
  const show = () => {
    const answer = live.replicas;
    if (!answer) { put(headline, 'Reading the replicas …'); return; }
    const { kind, head, found } = condition(answer, why);
    if (sick.length) found.push(`${plural(sick.length, 'backend needs', 'backends need')} attention: ${sick.slice(0, 5).join(', ')}${sick.length > 5 ? ' and more' : ''}.`);
    attr(banner, 'class', `banner ${kind === 'good' && sick.length ? 'warn' : kind}`);
    put(headline, kind === 'good' && sick.length ? `${answer.replicas.length} of ${answer.replicas.length} replicas answer.` : head);
    keyed(list, found.map((text, at) => ({ text, at })), (it) => it.at, () => h('li'), (node, it) => put(node, it.text));
    const now = live.history[live.history.length - 1];
    leader.show(answer.leader ? `Replica ${answer.leader}` : 'None', answer.leader ? `Term ${answer.term}` : answer.replicas.length ? 'No quorum answers' : 'Not in a cluster', answer.leader ? '' : 'fault');
    longest.show(now.longest ? (now.longest.user ?? now.longest.user_key) : 'Nobody', now.longest ? `${ms(now.longest.waited_ms)} at replica ${now.longest.replica} · ${plural(now.waiting, 'request')} in the queue` : 'The queue is empty');
    showState(agree, answer);
    [...charts, ...more].forEach((it) => it.show(live.history));
    replicas.show(answer.replicas);
  };
  const showEvents = () => {
    const latest = live.events.slice(0, 8);
    swap(events, latest.length ? latest.map(eventLine) : h('li', { class: 'empty' }, `Nothing has happened since replica ${live.me.replica} started.`));
  };
  watch(signal, (what) => (what === 'event' ? showEvents() : show()));
  worst.show('…', 'Reading the backends');
  every(4000, signal, async (it) => {
    const found = [];
    await pages('/admin/v1/backends', (page) => found.push(...page.backends), it);
    const all = judge(found);
    sick = all.filter((one) => one.level > 2).map((one) => one.id);
    const judged = all[0];
    if (!judged) worst.show('None', 'No backend is registered', 'fault');
    else worst.show(judged.id, judged.why || (judged.first === null ? 'Healthy, and nothing is learned of any yet' : `Healthy, and the slowest: first token of 1,000 tokens after ${ms(judged.first)}`), judged.level > 2 ? 'fault' : '');
  });
  every(2000, signal, async (it) => {
    const isFailing = live.replicas && failing(live.replicas) > 0;
    why = isFailing ? reasons((await get(`/admin/v1/decisions?failed=true&limit=${FAILURES}`, it)).decisions) : '';
  });
  show();
  showEvents();
}

export function eventLine(it) {
  const [text, kind] = event(it);
  return h('li', null, h('time', { class: 'num' }, time(it.at_ms)), status(kind ?? 'none', text));
}
