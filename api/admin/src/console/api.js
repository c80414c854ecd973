// Calls of the admin API: token, errors, polling with backoff, and the event stream.

const KEY = 'quorate-token';
const TIMEOUT_MS = 10_000;

/** Error response of the API. */
export class ApiError extends Error {
  constructor(status, problem) {
    super(problem?.detail ?? problem?.title ?? (status ? `The replica answered ${status}` : 'No answer'));
    this.status = status;
    this.problem = problem;
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (secret) => (secret ? sessionStorage.setItem(KEY, secret) : sessionStorage.removeItem(KEY)),
};

/** `onanswer(is_there)` is called after every response or failed call; `onunauthorized` must sign in. */
export const hooks = { onanswer: () => {}, onunauthorized: () => {} };

async function open(method, path, { body, signal, ...more } = {}) {
  const headers = { accept: 'application/json', ...more.headers };
  const secret = token.get();
  if (secret) headers.authorization = `Bearer ${secret}`;
  if (body !== undefined) headers['content-type'] = 'application/json';
  let answer;
  try {
    answer = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body), cache: 'no-store' });
  } catch (fault) {
    if (fault.name === 'AbortError') throw fault;
    hooks.onanswer(false);
    throw new ApiError(0);
  }
  hooks.onanswer(true);
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => undefined);
  if (answer.status === 401) hooks.onunauthorized();
  throw new ApiError(answer.status, problem);
}

export async function call(method, path, { body, headers, signal } = {}) {
  const limit = AbortSignal.timeout(TIMEOUT_MS);
  const both = signal ? AbortSignal.any([signal, limit]) : limit;
  try {
    const answer = await open(method, path, { body, headers, signal: both });
    const text = await answer.text();
    return text ? JSON.parse(text) : undefined;
  } catch (fault) {
    if (fault.name !== 'TimeoutError' && !(fault.name === 'AbortError' && limit.aborted)) throw fault;
    hooks.onanswer(false);
    throw new ApiError(0);
  }
}

export const get = (path, signal) => call('GET', path, { signal });

/** Path of a user; the unencoded name `defaults` is the path of the defaults of users. */
export const pathOfUser = (name) => `/admin/v1/users/${name === 'defaults' ? '%64efaults' : encodeURIComponent(name)}`;

/** Replaces settings with what `change(config)` makes of them, unless somebody else has just changed them. */
export async function edit(path, change) {
  const read = await open('GET', path);
  const { config } = await read.json();
  return call('PUT', path, { body: change(config), headers: { 'if-match': read.headers.get('etag') } });
}

/** Fetches all pages of a list in order and calls `take(page)` for each. */
export async function pages(path, take, signal) {
  let cursor = '';
  do {
    const page = await get(`${path}${path.includes('?') ? '&' : '?'}limit=1000${cursor ? `&cursor=${encodeURIComponent(cursor)}` : ''}`, signal);
    take(page);
    cursor = page.next_cursor;
  } while (cursor);
}

const wait = (ms, signal) => new Promise((resolve) => {
  const done = () => { clearTimeout(timer); document.removeEventListener('visibilitychange', seen); signal.removeEventListener('abort', done); resolve(); };
  const timer = setTimeout(done, ms);
  const seen = () => { if (!document.hidden) done(); };
  document.addEventListener('visibilitychange', seen);
  signal.addEventListener('abort', done);
});

/** Calls `look(signal)` every `ms`, starting now, until `signal`. Doubles the interval after each failure; pauses while the page is hidden. */
export async function every(ms, signal, look, failed = () => {}) {
  let failures = 0;
  while (!signal.aborted) {
    if (!document.hidden) {
      try {
        await look(signal);
        failures = 0;
      } catch (fault) {
        if (signal.aborted) return;
        failures += 1;
        failed(fault);
        if (!(fault instanceof ApiError)) console.error(fault);
      }
    }
    await wait(Math.min(ms * 2 ** Math.min(failures, 4), Math.max(ms, 8000)), signal);
  }
}

/** Reads events until `signal`, the last `past` first. Resumes a broken stream after the last event; the server reports missed ones. */
export async function follow(past, signal, take) {
  let pause = 500;
  let last = '';
  while (!signal.aborted) {
    try {
      const answer = await open('GET', `/admin/v1/events${last ? '' : `?last=${past}`}`, { signal, headers: last ? { 'last-event-id': last } : {} });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = '';
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        pause = 500;
        const parts = (rest + value).split('\n\n');
        rest = parts.pop();
        for (const part of parts) {
          const line = (name) => part.split('\n').find((it) => it.startsWith(`${name}:`))?.slice(name.length + 1).trim();
          const data = line('data');
          if (data) take(line('event'), JSON.parse(data));
          last = line('id') ?? last;
        }
      }
    } catch (fault) {
      if (signal.aborted) return;
    }
    await wait(pause, signal);
    pause = Math.min(pause * 2, 8000);
  }
}
