// The console in a real Chromium, over a real cluster of three replicas with emulated engines.
// `node run.mjs [NAME]` runs all tests, or those whose name has NAME in it.

import assert from 'node:assert/strict';
import { readFileSync, mkdirSync, existsSync } from 'node:fs';
import { chromium } from 'playwright-core';
import { Cluster, until } from './cluster.mjs';

const AXE = readFileSync(new URL('./node_modules/axe-core/axe.min.js', import.meta.url), 'utf8');
const PAGES = ['overview', 'backends', 'ownership', 'users', 'sessions', 'decisions', 'policy', 'log', 'config'];
const FLAGS = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
  '--disable-dev-shm-usage', '--disable-background-networking', '--disable-component-update', '--disable-sync'];
const EXECUTABLE = process.env.CHROMIUM ?? '/usr/bin/chromium';
const SHOTS = process.env.SHOTS;

/** A page of the console that is signed in, and what the browser complained of. */
async function open(browser, cluster, { id = 1, role = 'operator', theme = 'light', width = 1280, height = 900, isSignedIn = true } = {}) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme: theme, reducedMotion: 'reduce' });
  if (process.env.FROM_DISK) await context.route(/^[^?#]*:\d+\/(console\/[^/]+)?$/, fromDisk);
  context.setDefaultTimeout(60_000);
  const page = await context.newPage();
  const complaints = [];
  const isLost = () => page.lost;
  page.on('pageerror', (fault) => complaints.push(`error: ${fault.stack}`));
  page.on('console', (message) => {
    if (message.type() !== 'error' && message.type() !== 'warning') return;
    // A replica that was killed answers nothing: the browser tells of that by itself.
    if (isLost() && /ERR_|Failed to load resource/.test(message.text())) return;
    if (page.expected?.test(message.text())) return;
    complaints.push(`${message.type()}: ${message.text()}`);
  });
  await page.addInitScript(() => {
    window.violations = [];
    document.addEventListener('securitypolicyviolation', (it) => window.violations.push(`${it.violatedDirective}: ${it.blockedURI}`));
  });
  if (isSignedIn) await page.addInitScript((token) => sessionStorage.setItem('quorate-token', token), cluster.tokens[role]);
  await page.goto(`${cluster.replicas[id - 1].admin}/`);
  if (isSignedIn) await page.getByRole('link', { name: 'Overview', exact: true }).waitFor();
  page.done = async () => {
    assert.deepEqual(complaints, [], 'the browser complains of nothing');
    assert.deepEqual(await page.evaluate(() => window.violations), [], 'the policy is kept');
    await context.close();
  };
  return page;
}

/** While the console is written: its files from the source, with the headers of the binary. */
async function fromDisk(route) {
  const answer = await route.fetch().catch(() => undefined);
  if (!answer) return route.abort();
  const name = new URL(route.request().url()).pathname.split('/').pop() || 'index.html';
  return route.fulfill({ response: answer, body: readFileSync(new URL(`../src/console/${name}`, import.meta.url)) });
}

async function show(page, name) {
  await page.evaluate((it) => { location.hash = `#/${it}`; }, name);
  const heading = `${name[0].toUpperCase()}${name.slice(1)}`;
  await page.getByRole('heading', { level: 1, name: heading }).waitFor();
  await holds(page, () => !/Reading the/.test(document.getElementById('main').textContent));
}

/** Rows of the page's table that show something. */
const rows = (page) => page.locator('.grid tbody tr:not(.space):not([hidden])');

/** Waits until there are as many. */
const has = (locator, count) => until(`there are ${count} of ${locator}`, async () => await locator.count() === count);

/** Waits until a tile of the overview says this; `text` as Playwright's filters have it. */
const tile = (page, name, text) => page.locator('.tile', { hasText: new RegExp(`^\\s*${name}`) }).filter(text).waitFor();

/** Waits until what was written into the page is laid out. Nothing moves there. */
const settled = (page) => page.evaluate(() => new Promise((done) => { requestAnimationFrame(() => requestAnimationFrame(done)); }));

/** Waits for `count` answers to the page's question for a list. */
async function asked(page, path, count) {
  for (let answers = 0; answers < count; answers += 1) await page.waitForResponse((it) => new URL(it.url()).pathname === path);
}

async function shot(page, name) {
  if (!SHOTS) return;
  mkdirSync(SHOTS, { recursive: true });
  await page.screenshot({ path: `${SHOTS}/${name}.png` });
}

const tests = {
  async 'every page shows what the cluster has'({ browser, cluster }) {
    const page = await open(browser, cluster);
    await page.getByText(/Replica \d leads term/).waitFor();
    await until('the page names the leader', async () => await page.locator('.replica.is-leader h3').textContent()
      === `Replica ${(await cluster.get('/admin/v1/cluster')).leader}`);
    await tile(page, 'State', { hasText: 'Equal' });
    await page.locator('details summary').click();
    await page.locator('details dd', { hasText: 'Agrees' }).waitFor();
    await show(page, 'backends');
    await has(rows(page), 4);
    await show(page, 'ownership');
    await page.locator('.own:not(.not)').first().waitFor();
    await show(page, 'users');
    await rows(page).nth(2).waitFor();
    await show(page, 'decisions');
    await rows(page).nth(2).waitFor();
    await show(page, 'policy');
    await page.getByText('Requests are routed by').waitFor();
    await page.getByRole('button', { name: 'Try all policies' }).click();
    await page.getByText(/\d+ decisions? of replica \d|has decided nothing yet/).waitFor();
    if (await page.getByText(/\d+ decisions? of replica \d/).count()) {
      await rows(page).filter({ hasText: 'cost (live)' }).getByText('0.0 %').first().waitFor();
      await rows(page).filter({ hasText: 'as decided' }).getByText(/engine-\d \d+ %/).waitFor();
      await has(rows(page), 15);
    }
    await show(page, 'log');
    await page.getByText('Put backend: engine-1').first().waitFor();
    await show(page, 'config');
    await page.getByRole('searchbox').fill('admission.order');
    await has(rows(page), 1);
    await page.done();
  },

  async 'somebody new finds the four answers'({ browser, cluster }) {
    // engine-1 serves one at a time, and users wait for it and for the others.
    await cluster.call('PUT', '/admin/v1/admission', { ...(await cluster.get('/admin/v1/admission')).config, concurrency: 1 });
    const stop = new AbortController();
    const sent = ['waiting-first', 'waiting-then', 'x', 'y', 'z', 'w', 'v'].map((user) => ({ user, text: `${user} `.repeat(40), tokens: 4000, signal: stop.signal }));
    sent.slice(2).forEach((it) => cluster.chat(it).catch(() => {}));
    await until('backends are full', async () => (await cluster.get('/admin/v1/waiting')).requests > 0);
    cluster.chat(sent[0]).catch(() => {});
    await until('the first waits', async () => (await cluster.get('/admin/v1/waiting')).waiting.some((it) => it.user === 'waiting-first'));
    cluster.chat(sent[1]).catch(() => {});
    await cluster.kill('engine-4');
    const page = await open(browser, cluster);
    const { leader } = await cluster.get('/admin/v1/cluster');
    await tile(page, 'Leader', { hasText: `Replica ${leader}` });
    await tile(page, 'Worst backend', { hasText: 'engine-4' });
    await tile(page, 'Longest wait', { hasNotText: 'Nobody' });
    await shot(page, 'overview-waiting');
    await page.locator('.tile', { hasText: 'Longest wait' }).click();
    await page.locator('.ranks li').first().waitFor();
    // Who waits longest changes: page and replica are asked until they say the same.
    await until('the page names who waits longest', async () => await page.locator('.ranks li strong').first().textContent()
      === (await cluster.get('/admin/v1/waiting')).waiting[0].user);
    await shot(page, 'users-waiting');
    stop.abort();
    const answer = await cluster.get('/admin/v1/admission');
    await cluster.call('PUT', '/admin/v1/admission', { ...answer.config, concurrency: 'adaptive' });
    await cluster.chat({ user: 'ada', text: 'why did it go there? '.repeat(30), requestId: 'asked-about' });
    await page.evaluate(() => { location.hash = '#/decisions'; });
    await page.getByRole('searchbox', { name: 'Request id' }).fill('asked-about');
    await page.keyboard.press('Enter');
    await page.locator('.because').waitFor();
    const { decisions: [why] } = await cluster.get('/admin/v1/decisions/asked-about');
    assert.match(await page.locator('.because').textContent(), new RegExp(`^Went to ${why.choice}, because `));
    assert.equal(await page.locator('.cand.chosen [role=rowheader]').textContent(), `${why.choice}Chosen`);
    await has(page.locator('.cand:not(.head)'), why.candidates);
    assert.match(await page.locator('.attempt').textContent(), /Left out: .*engine-4/);
    await shot(page, 'decision');
    cluster.restartEngine(4);
    await until('engine-4 is healthy', async () => (await cluster.get('/admin/v1/backends/engine-4')).state.is_healthy);
    await page.done();
  },

  async 'a tree of sessions is shown with its children, and ended'({ browser, cluster }) {
    for (const [session, parent] of [['lead'], ['helper', 'lead'], ['helper-of-helper', 'helper'], ['other']]) {
      await cluster.chat({ user: 'agents', text: 'one turn of an agent '.repeat(30), session, parent });
    }
    const page = await open(browser, cluster);
    page.expected = /404/;
    await page.evaluate(() => { location.hash = '#/sessions/?user=agents'; });
    await has(rows(page), 2);
    const tree = rows(page).filter({ has: page.locator('td', { hasText: /^3$/ }) });
    await tree.locator('button.link').first().click();
    await has(page.locator('.picture tbody tr'), 3);
    await has(page.locator('.picture tbody .depth-2'), 1);
    await shot(page, 'session-tree');
    await page.getByRole('button', { name: 'End …' }).click();
    await page.getByRole('dialog').getByRole('button', { name: 'End', exact: true }).click();
    await page.getByText('This tree has ended').waitFor();
    await has(rows(page), 1);
    await page.done();
  },

  async 'nothing serious is found by axe, in light and dark'({ browser, cluster }) {
    for (const theme of ['light', 'dark']) {
      const page = await open(browser, cluster, { theme });
      for (const name of PAGES) {
        await show(page, name);
        if (name === 'backends' || name === 'decisions') {
          await rows(page).locator('button.link').first().click();
          await page.locator(name === 'backends' ? '.detail h2' : '.because').waitFor();
        }
        await settled(page);
        await shot(page, `${name}-${theme}`);
        const found = await axe(page);
        assert.deepEqual(found, [], `${name}, ${theme}`);
      }
      await page.done();
    }
  },

  async 'all of it can be reached by keyboard'({ browser, cluster }) {
    const page = await open(browser, cluster);
    await page.keyboard.press('Tab');
    assert.equal(await page.evaluate(() => document.activeElement.textContent), 'Skip to content');
    for (const name of ['Backends', 'Users', 'Decisions']) {
      await tabTo(page, (it) => it.matches('.side a') && it.textContent === name, name);
      await page.keyboard.press('Enter');
      await page.getByRole('heading', { level: 1, name }).waitFor();
      await rows(page).first().waitFor();
      await tabTo(page, (it) => it.matches('.grid tbody button'), name);
      await page.keyboard.press('Enter');
      await page.locator('.detail h2, .because').first().waitFor();
    }
    await show(page, 'backends');
    await rows(page).first().waitFor();
    await tabTo(page, (it) => it.matches('.grid tbody button'), '');
    await page.keyboard.press('Enter');
    await tabTo(page, (it) => it.textContent === 'Drain …', '');
    await page.keyboard.press('Enter');
    await page.getByRole('dialog').waitFor();
    await page.keyboard.press('Escape');
    await page.getByRole('dialog').waitFor({ state: 'detached' });
    await page.done();
  },

  async '360 pixels suffice, without scrolling sideways'({ browser, cluster }) {
    const page = await open(browser, cluster, { width: 360, height: 740 });
    for (const name of PAGES) {
      await show(page, name);
      await settled(page);
      const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      const wide = await page.evaluate(() => [...document.querySelectorAll('main *')].filter((it) => it.getBoundingClientRect().right > innerWidth)
        .slice(0, 8).map((it) => `${it.tagName}.${it.className?.baseVal ?? it.className} ${Math.round(it.getBoundingClientRect().right)}`));
      assert.ok(over <= 0, `${name} is ${over} pixels too wide: ${wide.join(', ')}`);
      await shot(page, `${name}-360`);
    }
    await page.done();
  },

  async 'no column is cut off on screens, with findings and without'({ browser, cluster }) {
    await cluster.call('PUT', '/admin/v1/backends/with-a-finding', { url: 'http://127.0.0.1:9', models: ['elsewhere'] });
    for (const width of [1440, 900, 390]) {
      const page = await open(browser, cluster, { width });
      for (const name of ['overview', 'backends', 'users', 'decisions', 'sessions']) {
        await show(page, name);
        await settled(page);
        const cut = await page.evaluate(() => [...document.querySelectorAll('.scroller, .flow')].map((it) => it.scrollWidth - it.clientWidth).filter((it) => it > 0));
        assert.deepEqual(cut, [], `${name} at ${width} pixels`);
      }
      await show(page, 'backends');
      const finding = page.locator('.findings li', { hasText: 'with-a-finding' });
      await finding.waitFor();
      assert.match(await finding.textContent(), /Not healthy: .*[^.]$/);
      assert.ok(await finding.evaluate((it) => it.scrollWidth <= it.clientWidth), 'the finding is whole');
      await page.done();
    }
    await cluster.call('DELETE', '/admin/v1/backends/with-a-finding');
  },

  async 'what happened before the page was opened is shown'({ browser, cluster }) {
    await cluster.call('PUT', '/admin/v1/backends/earlier', { url: 'http://127.0.0.1:9', models: ['elsewhere'] });
    await until('it was noticed', async () => (await cluster.get('/admin/v1/backends/earlier')).probes.total > 0);
    await cluster.call('DELETE', '/admin/v1/backends/earlier');
    const page = await open(browser, cluster);
    await page.locator('.events time').first().waitFor();
    await show(page, 'log');
    for (const change of ['added', 'removed']) await page.locator('.events li', { hasText: `Backend earlier: ${change}` }).waitFor();
    await page.done();
  },

  async 'who has no token sees nothing, and roles decide what is offered'({ browser, cluster }) {
    const stranger = await open(browser, cluster, { isSignedIn: false });
    stranger.expected = /401/;
    const calls = [];
    stranger.on('response', (it) => it.url().includes('/admin/v1/') && calls.push(it.status()));
    await stranger.getByLabel('Token').fill('qat-wrong');
    await stranger.getByRole('button', { name: 'Sign in' }).click();
    await stranger.getByText('No operator has this token.').waitFor();
    assert.ok(calls.every((status) => status === 401), `${calls}`);
    assert.deepEqual(await axe(stranger), []);
    await stranger.getByLabel('Token').fill(cluster.tokens.viewer);
    await stranger.keyboard.press('Enter');
    await stranger.getByText('Read only').waitFor();
    await show(stranger, 'backends');
    await rows(stranger).locator('button.link').first().click();
    await stranger.getByText('Its decisions').waitFor();
    for (const [name, text] of [['backends', 'Drain …'], ['log', 'Transfer leadership …'], ['policy', 'Change …']]) {
      await show(stranger, name);
      assert.equal(await stranger.getByText(text).count(), 0, text);
    }
    await stranger.getByRole('button', { name: 'Sign out' }).click();
    await stranger.getByLabel('Token').waitFor();
    assert.equal(await stranger.evaluate(() => sessionStorage.length), 0);
    await stranger.done();
  },

  async 'what operators confirm changes the cluster'({ browser, cluster }) {
    const page = await open(browser, cluster);
    const confirmWith = async (verb) => {
      await page.getByRole('dialog').getByRole('button', { name: verb, exact: true }).click();
      await page.getByRole('dialog').waitFor({ state: 'detached' });
    };
    await show(page, 'backends');
    await page.getByRole('button', { name: 'engine-2', exact: true }).click();
    await page.getByRole('button', { name: 'Drain …' }).click();
    await page.getByText('No replica sends engine-2 new requests from now on.').waitFor();
    await page.getByRole('button', { name: 'Cancel' }).click();
    assert.equal((await cluster.get('/admin/v1/backends/engine-2')).state.is_draining, false);
    await page.getByRole('button', { name: 'Drain …' }).click();
    await shot(page, 'drain');
    assert.deepEqual(await axe(page), []);
    await confirmWith('Drain');
    assert.equal((await cluster.get('/admin/v1/backends/engine-2')).state.is_draining, true);
    await page.getByRole('button', { name: 'Undrain …' }).click();
    await confirmWith('Undrain');
    assert.equal((await cluster.get('/admin/v1/backends/engine-2')).state.is_draining, false);

    await show(page, 'users');
    await page.getByRole('button', { name: 'ada', exact: true }).click();
    await page.getByRole('button', { name: 'Set weight …' }).click();
    await page.getByLabel('Weight (1 is usual)').fill('2.5');
    await page.getByText('ada gets 2.5 times the service').waitFor();
    await confirmWith('Set weight');
    assert.equal((await cluster.get('/admin/v1/users/ada')).weight_milli, 2500);

    await show(page, 'policy');
    await page.getByRole('button', { name: 'Change …' }).click();
    await page.getByLabel('Its settings, as JSON').fill('{"near_permille": -1}');
    page.expected = /400/;
    await page.getByRole('dialog').getByRole('button', { name: 'Change the policy' }).click();
    await page.getByRole('dialog').getByRole('alert').getByText('near_permille').waitFor();
    await page.locator('#policy').selectOption('least-request');
    await page.getByText('Every replica decides by least-request in place of cost').waitFor();
    await confirmWith('Change the policy');
    assert.equal((await cluster.get('/admin/v1/policy')).config.policy, 'least-request');
    await cluster.call('PUT', '/admin/v1/policy', { policy: 'cost' });

    await show(page, 'log');
    const { leader } = await cluster.get('/admin/v1/cluster');
    const to = (leader % 3) + 1;
    await page.getByRole('button', { name: 'Transfer leadership …' }).click();
    await page.getByLabel('New leader').selectOption(String(to));
    await page.getByText(`Replica ${to} leads the next term.`).waitFor();
    await confirmWith('Transfer leadership');
    await page.getByText(`Replica ${to} leads term`).first().waitFor();
    await page.getByRole('button', { name: 'Take a snapshot …' }).click();
    await confirmWith('Take a snapshot');
    await page.locator('.toast', { hasText: 'Snapshot taken' }).waitFor();
    await until('the audit has who it was', async () => (await cluster.get('/admin/v1/audit')).calls.some((it) => it.who === 'operator-1'));
    await page.done();
  },

  async 'names keep their signs on the way through an address'({ browser, cluster }) {
    const user = 'a+b & 50%2B/c?';
    assert.equal((await cluster.chat({ user, text: 'hello' })).status, 200);
    const page = await open(browser, cluster);
    await show(page, 'users');
    await page.getByRole('button', { name: user, exact: true }).click();
    await page.getByRole('link', { name: 'Their decisions' }).click();
    await page.getByRole('heading', { level: 1, name: 'Decisions' }).waitFor();
    assert.equal(await page.getByRole('searchbox', { name: 'User' }).inputValue(), user);
    await has(rows(page), 1);
    // What nobody encoded is no fault of the page.
    await page.evaluate(() => { location.hash = '#/users/50%'; });
    await page.getByRole('heading', { level: 1, name: 'Users' }).waitFor();
    await page.done();
  },

  async 'who is deleted is gone, and the last page of backends counts'({ browser, cluster }) {
    await cluster.call('PUT', '/admin/v1/users/leaver', { weight_milli: 2000 });
    await cluster.call('PUT', '/admin/v1/backends/nowhere', { url: 'http://127.0.0.1:9', models: ['elsewhere'] });
    const page = await open(browser, cluster);
    await show(page, 'users');
    // As with more backends than fit a page.
    await page.route(/\/admin\/v1\/backends\?/, (route) => route.continue({ url: route.request().url().replace('limit=1000', 'limit=2') }));
    await show(page, 'overview');
    await tile(page, 'Worst backend', { hasText: 'nowhere' });
    await cluster.call('DELETE', '/admin/v1/backends/nowhere');
    await tile(page, 'Worst backend', { hasNotText: 'nowhere' });
    await show(page, 'users');
    const leaver = page.getByRole('button', { name: 'leaver', exact: true });
    await leaver.waitFor();
    await cluster.call('DELETE', '/admin/v1/users/leaver');
    await leaver.waitFor({ state: 'hidden' });
    await page.done();
  },

  async 'events go on where they ended'({ browser, cluster }) {
    const page = await open(browser, cluster, { id: 3 });
    await page.getByText(/Replica \d leads term/).first().waitFor();
    page.lost = true;
    const again = page.waitForRequest((it) => it.url().endsWith('/admin/v1/events') && 'last-event-id' in it.headers());
    await show(page, 'log');
    await cluster.kill('replica-3');
    cluster.startReplica(3);
    assert.match((await again).headers()['last-event-id'], /^[0-9a-f]{8}-\d+$/);
    await page.getByText('This replica has started anew').first().waitFor({ timeout: 60_000 });
    await page.done();
  },

  async 'a leader is killed while the page is open'({ browser, cluster }) {
    const { leader } = await cluster.get('/admin/v1/cluster');
    const other = (leader % 3) + 1;
    const page = await open(browser, cluster, { id: other });
    await page.getByText(`Replica ${leader} leads term`).first().waitFor();
    await cluster.kill(`replica-${leader}`);
    await page.getByText(new RegExp(`Replica [${[1, 2, 3].filter((it) => it !== leader).join('')}] leads term`)).first().waitFor();
    await page.locator('.banner.bad', { hasText: `Replica ${leader} has stopped` }).waitFor();
    await shot(page, 'leader-killed');
    cluster.startReplica(leader);
    await page.locator('.banner', { hasText: `Replica ${leader} has stopped` }).waitFor({ state: 'detached', timeout: 60_000 });
    await page.locator('.replica .status.bad').first().waitFor({ state: 'detached' });
    await page.done();
  },

  async 'without a quorum, the whole page says so'({ browser, cluster }) {
    for (const id of [2, 3]) await cluster.kill(`replica-${id}`);
    const page = await open(browser, cluster, { id: 1 });
    await page.locator('.banner.bad', { hasText: 'requests go on, and changes are refused' }).waitFor();
    await tile(page, 'Leader', { hasText: 'None' });
    await tile(page, 'State', { hasText: 'No other replica answers' });
    await page.locator('.top', { hasText: 'No leader' }).getByText(/Degraded, updated/).waitFor();
    await page.locator('.reasons li', { hasText: /Replica 2 has (stopped|not answered)/ }).waitFor();
    await shot(page, 'no-quorum');
    assert.deepEqual(await axe(page), []);
    for (const id of [2, 3]) cluster.startReplica(id);
    await page.locator('.banner.bad[role=status]').waitFor({ state: 'detached' });
    await page.done();
  },

  async 'a replica outside a cluster says that it answers no request'({ browser, cluster }) {
    await cluster.kill('replica-3');
    const restore = cluster.loseStore(3);
    cluster.startReplica(3);
    await until('it serves its console', async () => (await fetch(`${cluster.replicas[2].admin}/livez`)).ok);
    const page = await open(browser, cluster, { id: 3 });
    const banner = page.locator('.banner.bad', { hasText: 'this replica answers every request with 503' });
    await banner.getByText(/Not in a cluster: replica 3 is a member with another store/).waitFor();
    await page.getByText(/Not ready, updated/).waitFor();
    await tile(page, 'Leader', { hasText: 'Not in a cluster' });
    await shot(page, 'outside-a-cluster');
    page.lost = true;
    await cluster.kill('replica-3');
    restore();
    cluster.startReplica(3);
    await page.getByText(/Ready, updated/).waitFor();
    await page.done();
  },

  async 'the page’s own replica is killed, and comes back'({ browser, cluster }) {
    const page = await open(browser, cluster, { id: 2 });
    await page.getByText(/(Ready|Degraded), updated/).waitFor();
    await page.getByText(/Replica \d leads term/).first().waitFor();
    page.lost = true;
    await cluster.kill('replica-2');
    await page.getByText(/Connection lost/).waitFor();
    await page.getByText('Replica 2 does not answer.').waitFor();
    const links = page.locator('.banner .links a');
    await has(links, 2);
    assert.ok((await links.first().getAttribute('href')).startsWith(cluster.replicas[0].admin));
    await shot(page, 'connection-lost');
    cluster.startReplica(2);
    await page.getByText(/(Ready|Degraded), updated/).waitFor({ timeout: 60_000 });
    await page.locator('.banner', { hasText: 'does not answer' }).waitFor({ state: 'hidden' });
    await page.done();
  },

  async '512 backends and 10,000 users are shown without a stall'({ browser, cluster }) {
    // Nobody listens there.
    await cluster.many(508, (number, id) => cluster.put(`/admin/v1/backends/many-${number}`, { url: `http://127.0.1.${1 + (number % 250)}:9`, models: ['elsewhere'] }, { id }));
    // Users come as they do to a cluster: with their first request.
    await cluster.many(10_000, (number, id) => until(`user-${number} is answered`, async () => (await cluster.chat({ user: `user-${number}`, text: 'hello', id, tokens: 1 })).status === 200));
    const page = await open(browser, cluster);
    await page.evaluate(() => {
      window.stalls = [];
      new PerformanceObserver((list) => list.getEntries().forEach((it) => window.stalls.push(Math.round(it.duration)))).observe({ type: 'longtask' });
    });
    for (const [name, count] of [['backends', 512], ['users', 10_000]]) {
      await show(page, name);
      await holds(page, (it) => Number(document.querySelector('.grid').getAttribute('aria-rowcount')) > it, count);
      const inPage = await page.locator('.grid tbody tr').count();
      assert.ok(inPage < 80, `${inPage} rows are in the page`);
      // Rows that are looked at again are written again, not made again.
      await page.evaluate(() => {
        window.added = 0;
        window.rowObserver = new MutationObserver((list) => list.forEach((it) => { window.added += [...it.addedNodes].filter((node) => node.nodeName === 'TR').length; }));
        window.rowObserver.observe(document.querySelector('.grid tbody'), { childList: true });
      });
      // The page asks again once it has written an answer.
      await asked(page, `/admin/v1/${name}`, 3);
      await settled(page);
      const added = await page.evaluate(() => { window.rowObserver.disconnect(); return window.added; });
      assert.equal(added, 0, `${name}: no row is made anew`);
      await page.locator('.scroller').evaluate((it) => { it.scrollTop = it.scrollHeight / 2; });
      await holds(page, (it) => Number(document.querySelector('.grid tbody tr:not(.space):not([hidden])').getAttribute('aria-rowindex')) > it, count / 3);
      await page.getByRole('searchbox').fill(name === 'backends' ? 'many-77' : 'user-7777');
      await until('few rows are left', async () => await rows(page).count() <= 2);
      await page.getByRole('searchbox').fill('');
    }
    // How long they take is the machine's: told, not judged.
    const stalls = await page.evaluate(() => window.stalls);
    console.log(`    long tasks: ${stalls.length}, the longest ${Math.max(0, ...stalls)} ms`);
    await shot(page, 'users-10000');
    await page.done();
  },
};

/** Waits until the function answers true in the page. Asked again and again from here: the page may evaluate nothing later. */
const holds = (page, condition, given) => until(`${condition}`, () => page.evaluate(condition, given));

async function axe(page) {
  // Evaluated by the debugger, not as a script of the page: its policy stays in force.
  await page.evaluate(AXE);
  const found = await page.evaluate(() => window.axe.run(document, { runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'] }));
  return found.violations.filter((it) => ['serious', 'critical'].includes(it.impact))
    .map((it) => `${it.id}: ${it.nodes.slice(0, 4).map((node) => `${node.html.slice(0, 160)} (${node.any[0]?.message ?? ''})`).join(' | ')}`);
}

/** Presses Tab until the focus is on what `isIt` finds. */
async function tabTo(page, isIt, name) {
  for (let presses = 0; presses < 120; presses += 1) {
    await page.keyboard.press('Tab');
    const source = `((name) => (${isIt})(document.activeElement))(${JSON.stringify(name)})`;
    if (await page.evaluate(source)) {
      assert.ok(await page.evaluate(() => getComputedStyle(document.activeElement).outlineStyle !== 'none'), 'the focus is seen');
      return;
    }
  }
  throw new Error(`not reached by Tab: ${isIt}`);
}

const wanted = process.argv[2] ?? '';
assert.ok(existsSync(EXECUTABLE), `${EXECUTABLE} is missing`);
const cluster = await Cluster.start();
const stopLoad = cluster.load();
const browser = await chromium.launch({ executablePath: EXECUTABLE, args: FLAGS });
let failed = 0;
try {
  await until('requests are kept', async () => (await cluster.get('/admin/v1/decisions?limit=50')).decisions.length >= 20);
  for (const [name, test] of Object.entries(tests)) {
    if (!name.includes(wanted)) continue;
    const began = Date.now();
    try {
      await test({ browser, cluster });
      console.log(`ok    ${name} (${((Date.now() - began) / 1000).toFixed(1)} s)`);
    } catch (fault) {
      failed += 1;
      console.log(`FAILED ${name}\n${fault.stack}`);
    }
  }
} finally {
  stopLoad();
  await browser.close();
  await cluster.stop();
}
process.exit(failed ? 1 : 0);
