// Changes to the cluster, each confirmed by a dialog that states its effect.

import { call, edit, pathOfUser } from './api.js';
import { h, put, swap } from './dom.js';
import { refresh } from './live.js';

/** Shows a brief notification. */
export function toast(text, kind = '') {
  const note = h('div', { class: `toast ${kind}` }, text);
  document.getElementById('toasts').append(note);
  setTimeout(() => note.remove(), 8000);
}

/**
 * Shows a confirmation dialog, then makes the change. `effect`: lines that describe it. `fields`:
 * extra input nodes. `request()` returns `{ method, path, body }`, or `{ path, change }` to edit settings, or throws what is
 * wrong with the fields.
 */
export function confirm({ title, effect, fields = [], verb, request, done, isGrave = false }) {
  const fault = h('p', { class: 'fault', role: 'alert', hidden: true });
  const go = h('button', { type: 'submit', class: isGrave ? 'grave' : 'primary' }, verb);
  const stop = h('button', { type: 'button', onclick: () => dialog.close() }, 'Cancel');
  const lines = h('ul', { class: 'effect' });
  const form = h('form', { method: 'dialog' }, h('h2', { id: 'ask' }, title), lines, fields, fault, h('div', { class: 'row end' }, stop, go));
  const dialog = h('dialog', { 'aria-labelledby': 'ask' }, form);
  const show = () => swap(lines, (typeof effect === 'function' ? effect() : effect).map((it) => h('li', null, it)));
  show();
  form.addEventListener('input', show);
  form.addEventListener('submit', async (submitted) => {
    submitted.preventDefault();
    go.disabled = true;
    fault.hidden = true;
    try {
      const { method, path, body, change } = request();
      const answer = await (change ? edit(path, change) : call(method, path, { body }));
      dialog.close();
      toast(`${done}${answer?.index ? ` at index ${answer.index}` : ''}.`, 'good');
      refresh();
    } catch (problem) {
      const outcome = problem.problem?.outcome === 'unknown' ? 'The outcome is not known; look before you repeat it. ' : '';
      put(fault, outcome + problem.message);
      fault.hidden = false;
      go.disabled = false;
    }
  });
  dialog.addEventListener('close', () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  (form.querySelector('input, select, textarea') ?? stop).focus();
}

export const drain = (id, running) => confirm({
  title: `Drain ${id}?`,
  effect: [`No replica sends ${id} new requests from now on.`, `${running ? `${running} under way there end` : 'What is under way there ends'} as usual.`, 'Its load goes to the other backends until it is undrained.'],
  verb: 'Drain',
  request: () => ({ method: 'POST', path: `/admin/v1/backends/${encodeURIComponent(id)}/drain` }),
  done: `${id} drains`,
});

export const undrain = (id) => confirm({
  title: `Undrain ${id}?`,
  effect: [`All replicas send ${id} requests again, once it is healthy.`],
  verb: 'Undrain',
  request: () => ({ method: 'POST', path: `/admin/v1/backends/${encodeURIComponent(id)}/undrain` }),
  done: `${id} takes requests again`,
});

export function setWeight(user) {
  const input = h('input', { type: 'number', id: 'weight', min: '0.001', step: 'any', required: true, value: String(user.weight_milli / 1000) });
  confirm({
    title: `Weight of ${user.name}`,
    effect: () => {
      const weight = Number(input.value);
      const times = weight / (user.weight_milli / 1000);
      return [weight > 0 ? `While users wait, ${user.name} gets ${Number(times.toFixed(2))} times the service it gets now, compared with others.` : 'A weight is above 0.', 'It counts for all replicas from one log index on. Counters and limits stay.'];
    },
    fields: [h('label', { class: 'field', for: 'weight' }, 'Weight (1 is usual)', input)],
    verb: 'Set weight',
    request: () => {
      const milli = Math.round(Number(input.value) * 1000);
      if (!(milli >= 1)) throw new Error('Expected a number above 0.');
      return { path: pathOfUser(user.name), change: (config) => ({ ...config, weight_milli: milli }) };
    },
    done: `Weight of ${user.name} is set`,
  });
}

export const endTree = (tree) => confirm({
  title: `End tree ${tree.root}?`,
  effect: ['All replicas forget its sessions, where they were, and what they have used of the limits per tree.', 'Its requests go on, and the next one of each session begins it anew.'],
  verb: 'End',
  request: () => ({ method: 'DELETE', path: `/admin/v1/session-trees/${tree.root}` }),
  done: 'The tree has ended',
});

export function transfer(members, leader) {
  const others = members.filter((it) => it.is_voter && it.id !== leader);
  const select = h('select', { id: 'to' }, h('option', { value: '' }, 'The most current one'), others.map((it) => h('option', { value: String(it.id) }, `Replica ${it.id}`)));
  confirm({
    title: 'Transfer leadership',
    effect: () => [select.value ? `Replica ${select.value} leads the next term.` : 'The voter whose log is the most current leads the next term.',
      `Replica ${leader ?? '–'} follows. Writes wait for some milliseconds; requests go on.`],
    fields: [h('label', { class: 'field', for: 'to' }, 'New leader', select)],
    verb: 'Transfer leadership',
    request: () => ({ method: 'POST', path: '/admin/v1/cluster/transfer-leader', body: select.value ? { to: Number(select.value) } : {} }),
    done: 'Leadership moved',
  });
}

export const snapshot = (id) => confirm({
  title: 'Take a snapshot?',
  effect: [`Replica ${id} writes its state to disk, and may drop the log entries before it.`, 'Requests go on meanwhile.'],
  verb: 'Take a snapshot',
  request: () => ({ method: 'POST', path: '/admin/v1/cluster/snapshot' }),
  done: 'Snapshot taken',
});
