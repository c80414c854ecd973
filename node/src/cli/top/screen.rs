//! The screen of `quorate top`: two lines about the cluster, and tables of replicas, backends, users
//! and trees of sessions.

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use lab::terminal::{FittedTable, is_coloured};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;
use ratatui::{DefaultTerminal, Frame};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::observer::{ClusterSample, Observer};
use super::summary::Summary;
use super::tables::{self, BackendOrder, UserOrder};

/// Interval at which keys are polled, and thus the maximum delay until the thread ends.
const KEYS_EVERY: Duration = Duration::from_millis(100);
/// Interval at which the displayed age of the data is updated.
const AGE_EVERY: Duration = Duration::from_secs(1);
/// Number of lines of a table besides its rows: its title and its header.
const TABLE_LINES_MIN: usize = 2;
const KEYS: &str = "q quit  tab next table  ↑↓ PgUp PgDn scroll  o order  p pause";

/// A table of the screen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TopSection {
    Replicas,
    Backends,
    Users,
    Trees,
}

const SECTIONS: [TopSection; 4] = [
    TopSection::Replicas,
    TopSection::Backends,
    TopSection::Users,
    TopSection::Trees,
];

/// The displayed data, and the state of the view.
#[derive(Debug)]
pub(super) struct TopScreen {
    is_coloured: bool,
    summary: Summary,
    /// Time of the last sample, displayed or not; `None` before the first.
    answered_at: Option<Instant>,
    /// Why the last request failed; `None` if it succeeded.
    failure: Option<String>,
    is_paused: bool,
    focus: usize,
    /// First visible row of each table.
    scrolled: [usize; SECTIONS.len()],
    /// Number of visible rows of each table.
    pages: [usize; SECTIONS.len()],
    backends: BackendOrder,
    users: UserOrder,
}

/// Fetches the next samples of the cluster.
struct ClusterSampler {
    observer: Observer,
    /// Sample that the next one is compared with.
    first: ClusterSample,
    every: Duration,
}

/// Shows the cluster until a key or a signal ends it.
pub(super) async fn run(
    (observer, first): (Observer, ClusterSample),
    every: Duration,
) -> anyhow::Result<ExitCode> {
    let mut screen = TopScreen::new(is_coloured(&std::io::stdout()));
    screen.take(None, &first);
    let mut terminal = ratatui::try_init().context("set up the terminal")?;
    let sampler = ClusterSampler {
        observer,
        first,
        every,
    };
    let ended = follow(&mut terminal, screen, sampler).await;
    ratatui::try_restore().context("put the terminal back")?;
    ended
}

async fn follow(
    terminal: &mut DefaultTerminal,
    mut screen: TopScreen,
    source: ClusterSampler,
) -> anyhow::Result<ExitCode> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut keys = keys();
    let (queue, mut samples) = mpsc::channel::<anyhow::Result<ClusterSample>>(1);
    let sampling = tokio::spawn(sample_regularly(source.observer, source.every, queue));
    let mut ages = interval(AGE_EVERY);
    let mut before = source.first;
    let code = loop {
        terminal.draw(|frame| screen.draw(frame, Instant::now()))?;
        tokio::select! {
            biased;
            _ = terminate.recv() => break ExitCode::from(143),
            key = keys.recv() => match key {
                Some(Event::Key(key)) if is_interrupt(key) => break ExitCode::from(130),
                Some(Event::Key(key)) if key.kind == KeyEventKind::Press => {
                    if screen.press(key.code) {
                        break ExitCode::SUCCESS;
                    }
                }
                // The screen is redrawn at its current size.
                Some(_) => {}
                None => break ExitCode::FAILURE,
            },
            sample = samples.recv() => match sample {
                Some(Ok(sample)) => {
                    screen.take(Some(&before), &sample);
                    before = sample;
                }
                // The last known data stays, with its age.
                Some(Err(error)) => screen.failure = Some(error.to_string()),
                None => break ExitCode::FAILURE,
            },
            _ = ages.tick() => {}
        }
    };
    sampling.abort();
    Ok(code)
}

/// Reads keys in a thread, which ends when the receiver is dropped.
fn keys() -> mpsc::Receiver<Event> {
    let (queue, keys) = mpsc::channel(16);
    thread::spawn(move || {
        while !queue.is_closed() {
            let read = event::poll(KEYS_EVERY).and_then(|is_ready| match is_ready {
                true => event::read().map(Some),
                false => Ok(None),
            });
            let Ok(event) = read else {
                return;
            };
            if event.is_some_and(|event| queue.blocking_send(event).is_err()) {
                return;
            }
        }
    });
    keys
}

async fn sample_regularly(
    mut observer: Observer,
    every: Duration,
    queue: mpsc::Sender<anyhow::Result<ClusterSample>>,
) {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    loop {
        ticks.tick().await;
        if queue.send(observer.sample().await).await.is_err() {
            return;
        }
    }
}

fn is_interrupt(key: KeyEvent) -> bool {
    key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL)
}

impl TopScreen {
    pub(super) fn new(is_coloured: bool) -> Self {
        Self {
            is_coloured,
            summary: Summary::default(),
            answered_at: None,
            failure: None,
            is_paused: false,
            focus: 1,
            scrolled: [0; SECTIONS.len()],
            pages: [1; SECTIONS.len()],
            backends: BackendOrder::default(),
            users: UserOrder::default(),
        }
    }

    /// Shows `sample`, with the changes since `before`, unless the screen is paused. `before` is
    /// `None` for the first sample.
    fn take(&mut self, before: Option<&ClusterSample>, sample: &ClusterSample) {
        self.failure = None;
        self.answered_at = Some(sample.at);
        if !self.is_paused {
            self.summary = Summary::of(before, sample);
        }
    }

    /// Handles a key. Returns whether the key ends the program.
    pub(super) fn press(&mut self, key: KeyCode) -> bool {
        let scrolled = &mut self.scrolled[self.focus];
        let page = self.pages[self.focus];
        match key {
            KeyCode::Char('q') | KeyCode::Esc => return true,
            KeyCode::Tab => self.focus = (self.focus + 1) % SECTIONS.len(),
            KeyCode::BackTab => self.focus = (self.focus + SECTIONS.len() - 1) % SECTIONS.len(),
            KeyCode::Up | KeyCode::Char('k') => *scrolled = scrolled.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => *scrolled = scrolled.saturating_add(1),
            KeyCode::PageUp => *scrolled = scrolled.saturating_sub(page),
            KeyCode::PageDown => *scrolled = scrolled.saturating_add(page),
            KeyCode::Home => *scrolled = 0,
            KeyCode::End => *scrolled = usize::MAX,
            KeyCode::Char('p') => self.is_paused = !self.is_paused,
            KeyCode::Char('o') => match SECTIONS[self.focus] {
                TopSection::Replicas | TopSection::Trees => {}
                TopSection::Backends => self.backends = self.backends.next(),
                TopSection::Users => self.users = self.users.next(),
            },
            _ => {}
        }
        false
    }

    pub(super) fn draw(&mut self, frame: &mut Frame<'_>, now: Instant) {
        let mut summary = self.summary.clone();
        self.backends.sort(&mut summary.backends);
        self.users.sort(&mut summary.users);
        let is_well = |section: TopSection| -> Vec<bool> {
            match section {
                TopSection::Replicas => summary.replicas.iter().map(|it| it.is_well).collect(),
                TopSection::Backends => summary.backends.iter().map(|it| it.is_well).collect(),
                TopSection::Users => vec![true; summary.users.len()],
                TopSection::Trees => vec![true; summary.trees.len()],
            }
        };
        let area = frame.area();
        let rows = SECTIONS.map(|section| is_well(section).len());
        let heights = heights(rows, usize::from(area.height).saturating_sub(3));
        let [head, tables @ .., foot] = Layout::vertical([
            Constraint::Length(2),
            Constraint::Length(heights[0]),
            Constraint::Length(heights[1]),
            Constraint::Length(heights[2]),
            Constraint::Length(heights[3]),
            Constraint::Fill(1),
        ])
        .areas::<6>(area);
        frame.render_widget(self.head(&summary, now), head);
        let sessions = format!("{}, listed", tables::sessions(&summary));
        for (nth, area) in tables.into_iter().enumerate() {
            let (title, table) = match SECTIONS[nth] {
                TopSection::Replicas => ("replicas", tables::replicas(&summary.replicas)),
                TopSection::Backends => ("backends", tables::backends(&summary.backends)),
                TopSection::Users => ("users", tables::users(&summary.users)),
                TopSection::Trees => (&*sessions, tables::trees(&summary.trees)),
            };
            self.draw_table(frame, area, nth, (title, &table, &is_well(SECTIONS[nth])));
        }
        let foot = Rect {
            y: area.bottom().saturating_sub(1),
            height: foot.height.min(1),
            ..foot
        };
        frame.render_widget(Paragraph::new(KEYS).style(self.dim()), foot);
    }

    fn head(&self, summary: &Summary, now: Instant) -> Paragraph<'static> {
        let mut line = vec![Span::styled(tables::cluster(summary), Modifier::BOLD)];
        let age = self.answered_at.map(|at| now.saturating_duration_since(at));
        let note = match age {
            Some(age) if self.failure.is_some() => {
                Some(format!("  no response for {} s", age.as_secs()))
            }
            Some(_) if self.is_paused => Some("  paused".to_owned()),
            Some(_) | None => None,
        };
        line.extend(note.map(|note| Span::styled(note, self.bad())));
        let is_bad = summary.is_agreed == Some(false) || (age.is_some() && !summary.has_quorum);
        if is_bad {
            line[0].style = self.bad();
        }
        let total = Line::from(tables::total(&summary.total));
        Paragraph::new(vec![Line::from(line), total])
    }

    fn draw_table(
        &mut self,
        frame: &mut Frame<'_>,
        area: Rect,
        nth: usize,
        (title, table, is_well): (&str, &FittedTable, &[bool]),
    ) {
        if area.height == 0 {
            return;
        }
        let page = usize::from(area.height).saturating_sub(TABLE_LINES_MIN);
        let last = is_well.len().saturating_sub(page);
        self.pages[nth] = page.max(1);
        self.scrolled[nth] = self.scrolled[nth].min(last);
        let first = self.scrolled[nth];
        let order = match SECTIONS[nth] {
            TopSection::Replicas => String::new(),
            TopSection::Trees => ", the busiest first".to_owned(),
            TopSection::Backends => format!(", {}", self.backends.label()),
            TopSection::Users => format!(", {}", self.users.label()),
        };
        let shown = match page > 0 && is_well.len() > page {
            true => format!(
                " {}-{} of {}",
                first + 1,
                (first + page).min(is_well.len()),
                is_well.len()
            ),
            false => format!(" {}", is_well.len()),
        };
        let mark = if nth == self.focus { "▸ " } else { "  " };
        let title = format!("{mark}{title}{shown}{order}");
        let mut lines = vec![Line::styled(title, self.dim())];
        let mut text = table.lines(usize::from(area.width)).into_iter();
        let heads = text.next().unwrap_or_default();
        lines.push(Line::styled(heads, Modifier::BOLD | Modifier::UNDERLINED));
        for (row, is_well) in text.zip(is_well).skip(first).take(page) {
            let style = if *is_well { Style::new() } else { self.bad() };
            lines.push(Line::styled(row, style));
        }
        frame.render_widget(Paragraph::new(lines), area);
    }

    fn bad(&self) -> Style {
        match self.is_coloured {
            true => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
            false => Style::new().add_modifier(Modifier::BOLD),
        }
    }

    fn dim(&self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }
}

/// Divides the lines of the screen among the tables, each with a title and a header. Shows all
/// replicas if possible. Backends and users share the rest. The trees, if any, get a line for their
/// title, and the lines that all others leave.
fn heights(rows: [usize; SECTIONS.len()], room: usize) -> [u16; SECTIONS.len()] {
    let wanted = rows.map(|rows| rows + TABLE_LINES_MIN);
    let all = room;
    let room = room.saturating_sub(usize::from(rows[3] > 0));
    let least = 2 * (TABLE_LINES_MIN + 1);
    let replicas = wanted[0]
        .min(room.saturating_sub(least).max(TABLE_LINES_MIN + 1))
        .min(room);
    let rest = room - replicas;
    let half = rest / 2;
    let backends = match (wanted[1] <= half, wanted[2] <= half) {
        (true, _) => wanted[1],
        (false, true) => wanted[1].min(rest - wanted[2]),
        (false, false) => rest - half,
    };
    let users = wanted[2].min(rest - backends);
    let trees = match rows[3] {
        0 => 0,
        _ => wanted[3].min(all - replicas - backends - users),
    };
    [replicas, backends, users, trees].map(|lines| u16::try_from(lines).unwrap_or(u16::MAX))
}

#[cfg(test)]
#[path = "screen_tests.rs"]
mod tests;
