// Where requests went, and why: the last decisions of all replicas, each as a diagram.

import { every, get } from './api.js';
import { setStatus, status } from './charts.js';
import { h, icon, put, svg, swap } from './dom.js';
import { NONE, count, ms, percent, plural, time } from './format.js';
import { table } from './table.js';
import { ATTEMPT_ENDS, OUTCOMES, REASONS, VERDICTS } from './words.js';

export const title = 'Decisions';

const SHOWN = 12;

export function mount(root, signal, [given = '']) {
  const query = given instanceof URLSearchParams ? given : new URLSearchParams();
  let open = given === query ? '' : given;
  let isHeld = false;
  /** Id of the shown decision, until its request has ended. */
  let unended = '';
  const summary = h('p', { class: 'note', role: 'status' }, 'Reading the decisions …');
  const field = (name, label) => h('input', { type: 'search', 'aria-label': label, placeholder: label, value: query.get(name) ?? '', autocomplete: 'off', onchange: () => look() });
  const by = { user: field('user', 'User'), backend: field('backend', 'Backend'), model: field('model', 'Model'), status: field('status', 'Status'), slower_than: field('slower_than', 'Slower than, like 2s') };
  const failed = h('input', { type: 'checkbox', checked: query.get('failed') === 'true', onchange: () => look() });
  const find = h('input', { type: 'search', id: 'request', placeholder: 'Request id', autocomplete: 'off' });
  const hold = h('button', { type: 'button', 'aria-pressed': 'false', onclick: () => { isHeld = !isHeld; hold.setAttribute('aria-pressed', String(isHeld)); put(hold, isHeld ? 'Go on' : 'Hold'); } }, 'Hold');
  const show = (id) => { open = id; history.replaceState(null, '', `#/decisions/${encodeURIComponent(id)}`); showOne(); };
  const grid = table({ label: 'Decisions', key: (row) => row.request_id, sort: { at: 0, down: true }, empty: 'No request was decided yet, or none fits.', columns: [
    { title: 'When', head: true, by: (row) => row.at_ms, down: true, make: () => {
      const node = h('button', { type: 'button', class: 'link num', onclick: () => show(node.row) });
      return { node, update: (row) => { node.row = row.request_id; put(node, time(row.at_ms)); } };
    } },
    { title: 'Replica', wide: true, number: true, by: (row) => row.replica, text: (row) => String(row.replica) },
    { title: 'User', by: (row) => row.user, text: (row) => row.user },
    { title: 'Model', wider: true, by: (row) => row.model, text: (row) => row.model },
    { title: 'Went to', by: (row) => row.last?.backend ?? '', text: (row) => (row.last ? `${row.last.prefill ? `${row.last.prefill} → ` : ''}${row.last.backend}` : 'Nowhere') },
    { title: 'Why', wider: true, by: (row) => row.last?.reason ?? '', text: (row) => (row.last ? REASONS[row.last.reason]?.[0] ?? row.last.reason : NONE) },
    { title: 'Prefix held', wider: true, number: true, by: (row) => (row.last ? row.last.matched / Math.max(1, row.blocks_total) : -1), text: (row) => (row.last ? `${count(row.last.matched)} / ${count(row.blocks_total)}` : NONE) },
    { title: 'Queued', wider: true, number: true, by: (row) => row.last?.waited_ms ?? -1, text: (row) => ms(row.last?.waited_ms) },
    { title: 'TTFT', wide: true, number: true, by: (row) => row.last?.ttft_ms ?? -1, text: (row) => ms(row.last?.ttft_ms) },
    { title: 'Status', number: true, by: (row) => row.end?.status ?? row.last?.status ?? -1, text: (row) => String(row.end?.status ?? row.last?.status ?? NONE) },
    { title: 'End', wide: true, by: (row) => row.end?.outcome ?? '', make: () => {
      const node = status('wait', '');
      return { node, update: (row) => setStatus(node, !row.end ? 'wait' : row.end.outcome === 'finished' ? 'good' : row.end.outcome === 'client-left' ? 'none' : 'bad', row.end ? OUTCOMES[row.end.outcome] ?? row.end.outcome : 'Under way') };
    } },
  ] });
  const picture = h('section', { class: 'card picture', 'aria-label': 'Decision', hidden: true, tabindex: '-1' });
  swap(root, h('form', { class: 'row tools', onsubmit: (it) => { it.preventDefault(); if (find.value.trim()) show(find.value.trim()); } }, h('label', { for: 'request', class: 'hidden' }, 'Request id'), find, h('button', { type: 'submit' }, 'Show'), Object.values(by), h('label', null, failed, ' Failed only'), hold),
    picture, summary, grid.node);

  async function look() {
    const wanted = new URLSearchParams({ limit: '200' });
    Object.entries(by).forEach(([name, it]) => it.value.trim() && wanted.set(name, it.value.trim()));
    if (failed.checked) wanted.set('failed', 'true');
    const list = await get(`/admin/v1/decisions?${wanted}`, signal);
    grid.set(list.decisions);
    const disk = list.disk && !list.disk.fault ? `on the disk of replica ${list.replica}, of all replicas` : `in the memory of replica ${list.replica}, of its own requests`;
    put(summary, `The last ${count(list.decisions.length)} ${disk}.${list.disk?.fault ? ` Its disk fails: ${list.disk.fault}.` : ''}`);
  }

  async function showOne() {
    if (!open) return;
    const isAgain = open === unended;
    unended = '';
    picture.hidden = false;
    const close = h('button', { type: 'button', class: 'plain', 'aria-label': 'Close', onclick: () => { open = ''; picture.hidden = true; history.replaceState(null, '', '#/decisions'); } }, icon('close'));
    const id = open;
    try {
      const request = await get(`/admin/v1/decisions/${encodeURIComponent(id)}`, signal);
      if (id !== open) return;
      const hadFocus = picture.contains(document.activeElement) && document.activeElement !== picture;
      draw(picture, request, close);
      if (!request.end) unended = id;
      if (isAgain) {
        if (hadFocus) close.focus({ preventScroll: true });
        return;
      }
    } catch (fault) {
      if (signal.aborted || id !== open) return;
      swap(picture, h('div', { class: 'row' }, h('h2', null, 'Not found'), h('span', { class: 'grow' }), close), h('p', null, fault.message));
    }
    picture.scrollIntoView({ block: 'nearest' });
    picture.focus({ preventScroll: true });
  }

  every(2000, signal, async () => {
    if (!isHeld) await look();
    if (unended && unended === open) await showOne();
  }, (fault) => put(summary, fault.message));
  showOne();
}

/** Formats a score for display: `cost` predicts nanoseconds. */
const scoreText = (policy, score) => (score === null ? NONE : policy === 'cost' ? ms(score / 1e6) : count(score));

function sentence(request, attempt) {
  const policy = attempt.policy.policy;
  const rivals = attempt.backends.filter((it) => it.verdict === 'candidate' && it.id !== attempt.choice).sort(best);
  const chosen = attempt.backends.find((it) => it.id === attempt.choice);
  const why = REASONS[attempt.reason]?.[1] ?? attempt.reason;
  const next = rivals[0] && chosen && chosen.score !== null && rivals[0].tier === chosen.tier
    ? ` It scored ${scoreText(policy, chosen.score)}; the next best, ${rivals[0].id}, ${scoreText(policy, rivals[0].score)} (less is better).` : '';
  const held = request.blocks_total ? ` It was believed to hold ${count(attempt.matched)} of the prompt’s ${count(request.blocks_total)} blocks.` : '';
  return [h('strong', null, `Went to ${attempt.choice}`), `, because ${why}.${next}${held}`];
}

const best = (a, b) => (a.tier ?? 9) - (b.tier ?? 9) || (a.score ?? 0) - (b.score ?? 0) || (a.then ?? 0) - (b.then ?? 0);

function draw(root, request, close) {
  const user = h('a', { href: `#/users/${encodeURIComponent(request.user)}` }, request.user);
  swap(root,
    h('div', { class: 'row' }, h('h2', null, 'Why it went there'), h('span', { class: 'grow' }), close),
    h('p', { class: 'note wrap' }, 'Request ', h('code', null, request.request_id), ` at ${time(request.at_ms)}, ${request.path}, model ${request.model}, user `, user, `, ${count(request.tokens)} prompt tokens, decided by replica ${request.replica}.${request.resumed ? ' Its client went on with a stream that broke off elsewhere.' : ''}`),
    request.decisions.length ? request.decisions.map((it, at) => attemptPicture(request, it, at)) : h('p', { class: 'because' }, `No backend was chosen: ${request.end ? `${OUTCOMES[request.end.outcome]}${request.end.code ? `, ${request.end.code}` : ''}` : 'it still waits'}.`));
}

function attemptPicture(request, attempt, at) {
  const policy = attempt.policy.policy;
  const candidates = attempt.backends.filter((it) => it.verdict === 'candidate').sort(best);
  const most = Math.max(1, ...candidates.map((it) => it.score ?? 0));
  const out = Object.entries(attempt.filtered).filter(([, number]) => number > 0);
  const named = attempt.backends.filter((it) => it.verdict !== 'candidate');
  const listed = candidates.slice(0, SHOWN);
  const { outcome } = attempt;
  const usage = outcome?.usage;
  const predicted = Math.min(attempt.matched * attempt.tokens_per_block, usage?.prompt_tokens ?? Infinity);
  return h('article', { class: 'attempt' },
    request.decisions.length > 1 && h('h3', null, `Attempt ${at + 1}`),
    h('p', { class: 'because' }, sentence(request, attempt)),
    attempt.is_panic && h('p', { class: 'fault' }, 'Most probes failed, so that health was ignored.'),
    h('div', { class: 'candidates', role: 'table', 'aria-label': 'Candidates' },
      h('div', { role: 'row', class: 'cand head' }, ['Backend', 'Prefix held', `Score, less is better`, 'In flight'].map((it) => h('span', { role: 'columnheader' }, it))),
      listed.map((it) => h('div', { role: 'row', class: `cand${it.id === attempt.choice ? ' chosen' : ''}` },
        h('span', { role: 'rowheader' }, it.id ?? 'removed', it.id === attempt.choice && h('span', { class: 'tag' }, 'Chosen')),
        h('span', { role: 'cell' }, blocks(it.matched, request.blocks_total), h('span', { class: 'num note' }, `${count(it.matched)} / ${count(request.blocks_total)}`)),
        h('span', { role: 'cell' }, h('span', { class: 'track', 'aria-hidden': 'true' }, h('span', { class: 'fill score', style: { width: `${Math.max(1, ((it.score ?? 0) / most) * 100)}%` } })), h('span', { class: 'num' }, scoreText(policy, it.score))),
        h('span', { role: 'cell', class: 'num' }, `${count(it.running)}${it.pending_prefill_tokens ? `, ${count(it.pending_prefill_tokens)} tokens to compute` : ''}`)))),
    candidates.length > SHOWN && h('p', { class: 'note' }, `and ${count(attempt.candidates - SHOWN)} more candidates with a worse score.`),
    out.length > 0 && h('p', null, 'Left out: ', out.map(([name, number]) => `${VERDICTS[name] ?? name} (${count(number)}${named.length ? `: ${named.filter((it) => it.verdict === name).map((it) => it.id).slice(0, 6).join(', ')}` : ''})`).join('; '), '.'),
    timeline(request, attempt),
    h('dl', { class: 'figures wide-figures' }, [
      ['Policy', `${policy}, named by ${String(attempt.policy_source).replaceAll('-', ' ')}`],
      ['At index', count(attempt.index)],
      ['Predicted cached', usage ? `${count(predicted)} tokens` : `${count(attempt.matched)} blocks`],
      ['Reported cached', usage?.cached_tokens === null || usage?.cached_tokens === undefined ? 'Not told' : `${count(usage.cached_tokens)} of ${count(usage.prompt_tokens)} tokens (${percent(usage.cached_tokens / usage.prompt_tokens)})`],
      ['Answer', attempt.failure ? `None: ${attempt.failure}` : attempt.status ? [`HTTP ${attempt.status}`, usage && plural(usage.completion_tokens, 'token'), outcome && ATTEMPT_ENDS[outcome.end]].filter(Boolean).join(', ') : 'Under way'],
    ].map(([name, text]) => h('div', null, h('dt', null, name), h('dd', null, text)))));
}

/** A prompt as a strip, with the held prefix filled. */
function blocks(matched, total) {
  const share = total ? Math.min(1, matched / total) * 100 : 0;
  return svg('svg', { class: 'strip', viewBox: '0 0 100 10', preserveAspectRatio: 'none', 'aria-hidden': 'true' }, svg('rect', { class: 'all', width: 100, height: 10, rx: 2 }), svg('rect', { class: 'held', width: share, height: 10, rx: 2 }));
}

/** Timeline of a request from when it was parsed: waiting, first token, response. */
function timeline(request, attempt) {
  const outcome = attempt.outcome;
  if (!outcome) return h('p', { class: 'note' }, 'Under way.');
  const first = outcome.ttft_ms ?? 0;
  const parts = [['waits', 'Waited for its turn', attempt.waited_ms], ['routes', 'Routed', Math.max(0, attempt.after_ms - attempt.waited_ms)], ['decodes', 'Answer', Math.max(0, outcome.duration_ms - first)]];
  if (outcome.ttft_ms !== null) parts.splice(2, 0, ['prefills', 'To the first token', first]);
  const all = parts.reduce((sum, [, , it]) => sum + it, 0) || 1;
  let from = 0;
  return h('figure', { class: 'time' },
    svg('svg', { viewBox: '0 0 100 8', preserveAspectRatio: 'none', role: 'img', 'aria-label': `It took ${ms(all)}` }, parts.map(([name, , it]) => {
      const width = (it / all) * 100;
      const bar = svg('rect', { class: name, x: from.toFixed(3), width: width.toFixed(3), height: 8 });
      from += width;
      return bar;
    })),
    h('figcaption', null, parts.map(([name, text, it]) => h('span', null, h('span', { class: `key ${name}`, 'aria-hidden': 'true' }), `${text} `, h('span', { class: 'num' }, ms(it))))));
}
