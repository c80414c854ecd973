// The log: terms and members, snapshots, changes with their authors, events.

import { every, get } from './api.js';
import { snapshot, transfer } from './actions.js';
import { setStatus, status } from './charts.js';
import { h, keyed, put, swap } from './dom.js';
import { NONE, count, time } from './format.js';
import { live, may, watch } from './live.js';
import { eventLine } from './page-overview.js';
import { ACTIONS, ROLES } from './words.js';

export const title = 'Log';

const list = (label, heads, body) => h('div', { class: 'flow', tabindex: '0', role: 'region', 'aria-label': label }, h('table', { class: 'plain-table' }, h('caption', { class: 'hidden' }, label), h('thead', null, h('tr', null, heads.map((it) => h('th', { scope: 'col' }, it)))), body));

export function mount(root, signal) {
  const facts = h('dl', { class: 'figures wide-figures' });
  const members = h('tbody');
  const audit = h('tbody');
  const events = h('ul', { class: 'events' });
  const tools = h('div', { class: 'row' }, may('operator') && h('button', { type: 'button', onclick: () => live.replicas && transfer(live.replicas.replicas, live.replicas.leader) }, 'Transfer leadership …'),
    may('operator') && h('button', { type: 'button', onclick: () => snapshot(live.me.replica) }, 'Take a snapshot …'));
  swap(root, tools, h('div', { class: 'card' }, facts), h('section', null, h('h2', null, 'Members'), list('Members', ['Replica', 'Role', 'Log', 'Clock', 'Address', 'Version'], members)),
    h('div', { class: 'halves' }, h('section', null, h('h2', null, 'Changes'), list('Changes', ['Index', 'When', 'What', 'Who'], audit)),
      h('section', null, h('h2', null, 'Events'), h('div', { class: 'card', tabindex: '0', role: 'region', 'aria-label': 'Events' }, events))));

  const showMembers = () => {
    if (!live.replicas) return;
    keyed(members, live.replicas.replicas, (it) => it.id, (it) => {
      const state = status('wait', '');
      const cells = [0, 1, 2, 3].map(() => h('td'));
      const row = h('tr', null, h('th', { scope: 'row' }, `Replica ${it.id}`), h('td', null, state), cells);
      row.show = (member) => {
        const role = member.is_leader ? 'Leader' : member.is_voter ? 'Follower' : 'Learner';
        setStatus(state, !member.is_connected ? 'bad' : member.is_leader ? 'lead' : 'good', member.is_connected ? role : member.is_refusing ? 'Stopped' : 'Not connected');
        put(cells[0], `Applied ${count(member.figures?.applied_index)}${member.lag ? `, ${count(member.lag)} behind` : ''}; snapshot ${member.figures?.snapshot_index ?? 'none yet'}`);
        put(cells[1], member.clock_skew_ms === null ? NONE : `${member.clock_skew_ms > 0 ? '+' : ''}${count(member.clock_skew_ms)} ms`);
        put(cells[2], member.peer);
        put(cells[3], member.version ?? NONE);
      };
      return row;
    }, (row, it) => row.show(it));
  };
  const showEvents = () => swap(events, live.events.length ? live.events.slice(0, 100).map(eventLine) : h('li', { class: 'empty' }, `Nothing has happened since replica ${live.me.replica} started.`));
  const look = async () => {
    const [cluster, written] = await Promise.all([get('/admin/v1/cluster', signal), get('/admin/v1/audit?limit=100', signal)]);
    const rows = [['Cluster', cluster.cluster_id], ['This replica', `${cluster.id}, ${(ROLES[cluster.role] ?? cluster.role).toLowerCase()}`], ['Term', count(cluster.term)],
      ['Committed', count(cluster.committed_index)], ['Applied', count(cluster.applied_index)], ['Snapshot', cluster.snapshot_index === null ? 'None yet' : count(cluster.snapshot_index)],
      ['Storage', cluster.fault ?? 'No fault'], ['Log', cluster.waiting ?? 'Writable']];
    keyed(facts, rows, ([name]) => name, ([name]) => h('div', null, h('dt', null, name), h('dd')), (node, [, text]) => put(node.lastChild, text));
    swap(audit, written.writes.length ? written.writes.map((it) => h('tr', null, h('td', { class: 'num' }, count(it.index)), h('td', { class: 'num' }, time(it.at_ms)), h('td', null, `${ACTIONS[it.action] ?? it.action.replaceAll('-', ' ')}${it.subject ? `: ${it.subject}` : ''}`), h('td', null, it.who ?? `through replica ${it.replica}`)))
      : h('tr', null, h('td', { colspan: 4, class: 'empty' }, 'Nobody has changed anything yet.')));
  };
  every(2000, signal, look);
  watch(signal, (what) => {
    if (what === 'replicas') showMembers();
    if (what === 'event') showEvents();
    if (what === 'written') look().catch(() => {});
  });
  showMembers();
  showEvents();
}
