//! Tests of the screen, which is rendered into memory.

use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::super::summary::{BackendRow, ReplicaRow, TreeRow, UserRow};
use super::*;

fn replica(id: u64, role: &str, state: &str) -> ReplicaRow {
    let is_well = state == "ready";
    ReplicaRow {
        id,
        role: role.to_owned(),
        state: state.to_owned(),
        is_well,
        applied: is_well.then_some(1584),
        lag: is_well.then_some(0),
        requests_per_s: is_well.then_some(63.12),
        ..ReplicaRow::default()
    }
}

fn backend(nth: u64) -> BackendRow {
    BackendRow {
        id: format!("gpu-{nth:02}"),
        state: "healthy".to_owned(),
        is_well: true,
        in_flight: nth,
        limit: Some(256),
        queued: Some(0),
        prompt_tokens_per_s: Some(nth as f64),
        hit_percent: Some(83.5),
        kv_usage_percent: Some(87.5 - nth as f64 / 10.0),
        owned_blocks: 3661,
        capacity_blocks: Some(8192),
        error_percent: Some(-0.9),
        ownership: "lease".to_owned(),
    }
}

fn user(name: &str, tokens: f64) -> UserRow {
    UserRow {
        user: name.to_owned(),
        weight_milli: 1500,
        in_flight: 3,
        waiting: 1,
        requests_per_s: Some(1.0),
        tokens_per_s: Some(tokens),
        share_percent: Some(50.0),
        fair_percent: Some(33.33),
        counter_milli_tokens: 84_091_000,
    }
}

fn tree(root: &str) -> TreeRow {
    TreeRow {
        root: root.to_owned(),
        user: "ada".to_owned(),
        homes: vec!["gpu-01".to_owned(), "gpu-00".to_owned()],
        sessions: 8,
        turns: 71,
        tokens_per_s: Some(310.04),
        hit_percent: Some(91.0),
        tokens: 5_120_000,
        idle_ms: 900,
    }
}

fn screen(backends: u64) -> TopScreen {
    let mut screen = TopScreen::new(false);
    screen.answered_at = Some(Instant::now());
    screen.summary = Summary {
        asked: Some(3),
        leader: Some(2),
        term: Some(7),
        has_quorum: true,
        is_agreed: Some(true),
        replicas: vec![
            replica(1, "-", "not connected"),
            replica(2, "leader", "ready"),
        ],
        backends: (0..backends).map(backend).collect(),
        users: vec![user("ada", 9.0), user("bob\u{1b}[2J", 10.0)],
        sessions_total: 40,
        trees_total: 25,
        trees: vec![tree("1f0c27f4a9d0c3b1"); 5],
        ..Summary::default()
    };
    screen
}

fn drawn(screen: &mut TopScreen, (columns, lines): (u16, u16)) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(columns, lines)).unwrap();
    let now = Instant::now();
    terminal.draw(|frame| screen.draw(frame, now)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let cells = buffer.content().chunks(usize::from(columns));
    let line = |row: &[ratatui::buffer::Cell]| {
        let text: String = row.iter().map(ratatui::buffer::Cell::symbol).collect();
        text.trim_end().to_owned()
    };
    cells.map(line).collect()
}

#[test]
fn a_screen_of_80_columns_shows_all_tables() {
    let lines = drawn(&mut screen(2), (80, 24));
    let wanted = [
        "leader 2  term 7  quorum  states are equal  (as reported by replica 3)",
        "0.0 requests/s  0.0 failed/s  cached -  in flight 0  waiting 0",
        "  replicas 2",
        "replica  role    state          requests/s  failed/s  TTFT p50 ms  applied  lag",
        "1        -       not connected           -         -            -        -    -",
        "2        leader  ready                63.1         -            -     1584    0",
        "▸ backends 2, those that need attention first",
        "backend  state    in flight  queued  prompt tok/s    hits  KV use  owned     off",
        "gpu-00   healthy          0       0             0  83.5 %  87.5 %   3661  -0.9 %",
        "gpu-01   healthy          1       0             1  83.5 %  87.4 %   3661  -0.9 %",
        "  users 2, those that wait first",
        "user          weight  waiting  in flight  requests/s  tokens/s   share    fair",
        "ada              1.5        1          3         1.0       9.0  50.0 %  33.3 %",
        "bob\\u{1b}[2J     1.5        1          3         1.0      10.0  50.0 %  33.3 %",
        "  40 sessions in 25 trees, listed 5, the busiest first",
        "tree              user  homes           sessions  turns  tokens/s    hits",
        "1f0c27f4a9d0c3b1  ada   gpu-01, gpu-00         8     71     310.0  91.0 %",
    ];
    assert_eq!(lines[..wanted.len()], wanted);
    assert_eq!(lines[23], KEYS);
}

#[test]
fn long_tables_scroll_and_sort() {
    let mut screen = screen(40);
    assert!(drawn(&mut screen, (80, 24))[6].contains("backends 1-"));
    assert!(!screen.press(KeyCode::End));
    let lines = drawn(&mut screen, (80, 24));
    assert!(
        lines.iter().any(|line| line.starts_with("gpu-39")),
        "{lines:?}"
    );
    assert!(!screen.press(KeyCode::Home));
    assert!(!screen.press(KeyCode::Char('o')));
    assert!(!screen.press(KeyCode::Char('o')));
    let lines = drawn(&mut screen, (80, 24));
    let first = lines.iter().find(|line| line.starts_with("gpu-")).unwrap();
    assert!(first.starts_with("gpu-39"), "by prompt tokens: {lines:?}");
    assert!(screen.press(KeyCode::Char('q')));
}

#[test]
fn top_draws_at_any_terminal_size() {
    for columns in 1..100 {
        for lines in 1..30 {
            drawn(&mut screen(12), (columns, lines));
        }
    }
    assert_eq!(heights([3, 512, 10_000, 0], 37), [5, 16, 16, 0]);
    assert_eq!(heights([3, 2, 10_000, 0], 37), [5, 4, 28, 0]);
    assert_eq!(heights([3, 512, 1, 100], 37), [5, 28, 3, 1]);
    assert_eq!(heights([3, 2, 1, 100], 37), [5, 4, 3, 25]);
}

#[test]
fn a_stale_screen_shows_its_age() {
    let mut screen = screen(1);
    screen.answered_at = Some(Instant::now() - Duration::from_secs(60));
    screen.failure = Some("cannot connect".to_owned());
    let lines = drawn(&mut screen, (100, 24));
    assert!(lines[0].ends_with("no response for 60 s"), "{}", lines[0]);
}
