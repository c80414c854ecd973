// The overview for operators.

import { every, pages } from './api.js';
import { lines, setStatus, status } from './charts.js';
import { attr, h, keyed, put, swap } from './dom.js';
import { NONE, bytes, count, duration, ms, percent, plural, rate, time } from './format.js';
import { isFresh, live, totals, watch } from './live.js';
import { ROLES, event } from './words.js';
import { judge } from './page-backends.js';

export const title = 'Overview';

/** Conditions that need attention, worst first; empty if all is well. */
export function problems(answer) {
  const found = [];
  if (!answer.leader) found.push('No replica leads: nothing is committed until one does.');
  if (!answer.has_quorum) found.push('No quorum answers: requests go on, writes wait.');
  const alike = new Map();
  const { requests, failed } = totals(answer);
  if (failed > 0.1 && failed > requests / 100) found.push(`${percent(failed / requests)} of the requests fail.`);
  for (const it of answer.replicas) {
    const say = (text) => alike.set(text, [...(alike.get(text) ?? []), it.id]);
    if (!it.is_connected) { say(it.is_refusing ? 'has stopped.' : 'is not connected.'); continue; }
    const figures = it.figures;
    if (it.digest && !it.digest.is_equal) say(`had another state at index ${it.digest.index}.`);
    if (!figures) continue;
    if (figures.is_minority) say('holds another state than most voters, and fetches theirs.');
    if (figures.has_fault) say('has a storage fault.');
    if (figures.is_log_waiting) say('waits to write its log, for example for disk space.');
    if (!figures.is_ready) say('does not take traffic.');
    if (it.lag > 1000) say(`is ${count(it.lag)} entries behind.`);
    if (figures.disk_size_bytes && figures.disk_free_bytes / figures.disk_size_bytes < 0.03) say(`has ${percent(figures.disk_free_bytes / figures.disk_size_bytes)} of its disk free.`);
  }
  for (const [text, ids] of alike) found.push(`${ids.length > 1 ? 'Each of replicas' : 'Replica'} ${ids.join(', ')} ${text}`);
  return found;
}

const FIGURES = [
  ['Applied index', (it) => count(it.figures?.applied_index)],
  ['Lag', (it) => (it.lag === null ? NONE : it.lag === 0 ? 'None' : plural(it.lag, 'entry', 'entries'))],
  ['State', (it) => (it.digest ? (it.digest.is_equal ? `Agrees at ${count(it.digest.index)}` : `Differs at ${count(it.digest.index)}`) : it.is_asked ? (live.replicas.replicas.some((other) => other.digest && !other.digest.is_equal) ? 'Differs' : 'Agrees') : 'Not compared')],
  ['Quorum', (it) => (it.figures ? (it.figures.has_quorum ? 'Yes' : 'No') : NONE)],
  ['Requests/s', (it) => rate(it.figures?.requests_per_s)],
  ['TTFT, half below', (it) => ms(it.figures?.ttft_p50_ms)],
  ['TTFT, 99 % below', (it) => ms(it.figures?.ttft_p99_ms)],
  ['Hit rate', (it) => (it.figures?.prompt_tokens ? percent(it.figures.cached_tokens / it.figures.prompt_tokens) : NONE)],
  ['Waiting', (it) => count(it.figures?.waiting)],
  ['Routing, half below', (it) => ms(it.figures?.routing_p50_ms)],
  ['Snapshot', (it) => (it.figures ? count(it.figures.snapshot_index) : NONE)],
  ['Log', (it) => (it.figures ? (it.figures.has_fault ? 'Fault' : it.figures.is_log_waiting ? 'Waits' : it.figures.outbox_items > 500 ? `${count(it.figures.outbox_items)} to write` : 'Writes') : NONE)],
  ['Disk free', (it) => (it.figures?.disk_size_bytes ? `${bytes(it.figures.disk_free_bytes)}, ${percent(it.figures.disk_free_bytes / it.figures.disk_size_bytes)}` : NONE)],
  ['Up for', (it) => duration(it.figures?.uptime_s)],
];

function replicaCard(it) {
  const state = status('wait', '');
  const chart = lines(`Requests per second of replica ${it.id}`);
  const cells = FIGURES.map(() => h('dd'));
  const rows = FIGURES.map(([name], at) => h('div', null, h('dt', null, name), cells[at]));
  const facts = h('p', { class: 'note' });
  const node = h('article', { class: 'card replica', 'aria-label': `Replica ${it.id}` },
    h('header', { class: 'row' }, h('h3', null, `Replica ${it.id}`), h('span', { class: 'grow' }), state), facts, chart.node, h('dl', { class: 'figures' }, rows));
  node.show = (replica) => {
    const isHeard = isFresh(replica) && replica.is_connected;
    const role = replica.is_leader ? 'Leader' : ROLES[replica.figures?.role] ?? (replica.is_voter ? 'Follower' : 'Learner');
    if (!replica.is_connected) setStatus(state, 'bad', replica.is_refusing ? 'Stopped' : 'Not connected');
    else if (replica.is_leader) setStatus(state, 'lead', 'Leader');
    else setStatus(state, !replica.figures || replica.figures.is_ready ? 'good' : 'warn', role === 'Leader' ? 'Follower' : role);
    node.classList.toggle('is-leader', replica.is_leader);
    node.classList.toggle('stale', !isHeard && Boolean(replica.figures));
    const parts = [replica.is_voter ? 'Voter' : 'Learner', replica.version && `version ${replica.version}`, replica.is_asked ? 'this page' : undefined,
      !isHeard && replica.heard_ms_ago !== null && `last heard ${duration(replica.heard_ms_ago / 1000)} ago`];
    put(facts, parts.filter(Boolean).join(' · '));
    FIGURES.forEach(([, read], at) => put(cells[at], read(replica)));
    cells[2].classList.toggle('fault', Boolean(replica.digest && !replica.digest.is_equal));
    chart.draw([live.byReplica.get(replica.id) ?? []], 1);
  };
  return node;
}

function tile(name, what, href) {
  const big = h('strong');
  const small = h('span', { class: 'note' });
  const node = h(href ? 'a' : 'div', { class: 'card tile', href }, h('span', { class: 'name' }, name), big, small);
  node.show = (value, note, kind = '') => { put(big, value); put(small, note ?? what); attr(big, 'class', kind); };
  return node;
}

function chartTile(name, note, classes, read, show) {
  const number = h('strong', { class: 'num' });
  const side = h('span', { class: 'note' });
  const chart = lines(name, classes);
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

export function mount(root, signal) {
  const banner = h('div', { class: 'banner', role: 'status' });
  const leader = tile('Leads', '', '#/log');
  const worst = tile('Worst backend', '', '#/backends');
  const longest = tile('Waiting longest', '', '#/users');
  const agree = tile('State', '');
  const charts = [
    chartTile('Requests per second', 'Ended in the last 10 s, all replicas', ['line-a'], (all) => [all.map((it) => it.requests)], (it) => [rate(it.requests), it.failed ? `${rate(it.failed)} failed` : 'None failed']),
    chartTile('Time to first token', 'Half of the requests below; thin: 99 of 100', ['line-a', 'line-b'], (all) => [all.map((it) => it.ttft50), all.map((it) => it.ttft99)], (it) => [ms(it.ttft50), `99 %: ${ms(it.ttft99)}`]),
    chartTile('Hit rate', 'Prompt tokens that engines had cached; thin: predicted', ['line-a', 'line-b'], (all) => [all.map((it) => it.hit), all.map((it) => it.predicted)], (it) => [percent(it.hit), `predicted ${percent(it.predicted)}`]),
    chartTile('Known by sharing', 'Predicted tokens that a replica knew from peers or from before its restart', ['line-a'], (all) => [all.map((it) => it.shared)], (it) => [percent(it.shared), 'of the predicted']),
    chartTile('Waiting requests', 'For a backend with room', ['line-a'], (all) => [all.map((it) => it.waiting)], (it) => [count(it.waiting), `${count(it.inFlight)} under way`]),
    chartTile('Cost of routing', 'What a request waits for the router; thin: 99 of 100', ['line-a', 'line-b'], (all) => [all.map((it) => it.routing50), all.map((it) => it.routing99)], (it) => [ms(it.routing50), `99 %: ${ms(it.routing99)}`]),
  ];
  const replicas = h('div', { class: 'cards replicas' });
  const events = h('ul', { class: 'events' });
  swap(root, banner, h('section', { class: 'cards tiles', 'aria-label': 'At a glance' }, leader, worst, longest, agree),
    h('section', null, h('h2', null, 'Replicas'), replicas),
    h('section', null, h('h2', null, 'Cluster'), h('div', { class: 'cards charts' }, charts)),
    h('section', null, h('h2', null, 'Latest events'), events));

  /** Backends that cannot take their share of requests. */
  let sick = [];
  const show = () => {
    const answer = live.replicas;
    if (!answer) { put(banner, 'Reading the replicas …'); return; }
    const found = problems(answer);
    attr(banner, 'class', `banner ${found.length ? 'bad' : sick.length ? 'warn' : 'good'}`);
    const all = answer.replicas.length;
    if (sick.length) found.push(`${plural(sick.length, 'backend needs', 'backends need')} a look: ${sick.slice(0, 5).join(', ')}${sick.length > 5 ? ' and more' : ''}.`);
    const isReplicas = found.length > (sick.length ? 1 : 0);
    put(banner, `${isReplicas ? '' : sick.length ? `${all} of ${all} replicas answer. ` : `All is well: ${all} of ${all} replicas answer, and a quorum agrees.`}${found.join(' ')}`);
    const now = live.history[live.history.length - 1];
    leader.show(answer.leader ? `Replica ${answer.leader}` : 'Nobody', `Term ${answer.term}`, answer.leader ? '' : 'fault');
    longest.show(now.longest ? (now.longest.user ?? now.longest.user_key) : 'Nobody', now.longest ? `${ms(now.longest.waited_ms)} at replica ${now.longest.replica} · ${count(now.waitingUsers)} users wait` : 'No request waits for a backend');
    const compared = answer.replicas.filter((it) => it.digest);
    const differ = compared.filter((it) => !it.digest.is_equal);
    agree.show(differ.length ? 'Differs' : compared.length ? 'Equal' : NONE, compared.length ? `Digests of ${compared.length + 1} replicas, last at index ${count(Math.max(...compared.map((it) => it.digest.index)))}` : 'Not compared yet', differ.length ? 'fault' : '');
    charts.forEach((it) => it.show(live.history));
    keyed(replicas, answer.replicas, (it) => it.id, replicaCard, (node, it) => node.show(it));
  };
  const showEvents = () => {
    const latest = live.events.slice(0, 8);
    if (!latest.length) { swap(events, h('li', { class: 'empty' }, 'Nothing has happened since this page was opened.')); return; }
    swap(events, latest.map(eventLine));
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
  show();
  showEvents();
}

export function eventLine(it) {
  const [text, kind] = event(it);
  return h('li', null, h('time', { class: 'num' }, time(it.at_ms)), status(kind ?? 'none', text));
}
