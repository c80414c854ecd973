//! Tables that fit the terminal: a narrow one gets fewer columns, but no broken words.

use std::fmt;

use unicode_width::UnicodeWidthStr;

use super::screen;

/// Text between two columns.
const GAP: &str = "  ";
/// Minimum width of a prose column whose text is longer.
const PROSE_COLUMNS_MIN: usize = 28;

/// A column of a table.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    head: &'static str,
    /// Rank by which columns are hidden, the greatest first. Columns of rank 0 are never hidden.
    rank: u8,
    form: ColumnForm,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ColumnForm {
    /// Text that is never wrapped.
    Text,
    /// Number that is aligned to the right.
    Number,
    /// Text that is wrapped between words.
    Prose,
}

/// Creates a text column with the header `head` that is always shown.
#[must_use]
pub const fn column(head: &'static str) -> Column {
    Column {
        head,
        rank: 0,
        form: ColumnForm::Text,
    }
}

impl Column {
    /// Sets the rank by which the column is hidden. Columns of greater rank are hidden first.
    #[must_use]
    pub const fn rank(mut self, rank: u8) -> Self {
        self.rank = rank;
        self
    }

    /// Right-aligns the column.
    #[must_use]
    pub const fn number(mut self) -> Self {
        self.form = ColumnForm::Number;
        self
    }

    /// Wraps the column's cells between words.
    #[must_use]
    pub const fn prose(mut self) -> Self {
        self.form = ColumnForm::Prose;
        self
    }
}

/// A table. Its display has as many columns as fit the terminal on stdout, or all in a pipe.
#[derive(Debug, Clone)]
pub struct FittedTable {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
}

/// Layout of a table for a given width.
struct TableLayout {
    /// Index and width of each visible column.
    shown: Vec<(usize, usize)>,
    /// Headers of the hidden columns.
    hidden: Vec<&'static str>,
}

impl FittedTable {
    /// Creates an empty table.
    #[must_use]
    pub fn new(columns: &[Column]) -> Self {
        Self {
            columns: columns.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row of cells. Missing cells are empty.
    pub fn add_row<I>(&mut self, cells: I)
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        let mut row: Vec<String> = cells.into_iter().map(Into::into).collect();
        row.resize(self.columns.len(), String::new());
        self.rows.push(row);
    }

    /// Formats the table for `width` columns of text; `None` for unlimited width.
    #[must_use]
    pub fn text(&self, width: Option<usize>) -> String {
        let layout = self.layout(width);
        let mut lines = self.laid_out(&layout);
        if !layout.hidden.is_empty() {
            let heads = layout.hidden.join(", ");
            lines.extend(wrapped(
                &format!("(not shown: {heads}; --wide shows them)"),
                width.unwrap_or(usize::MAX),
            ));
        }
        lines.join("\n")
    }

    /// Formats the table for `width` columns, starting with the header. Does not mention hidden
    /// columns.
    #[must_use]
    pub fn lines(&self, width: usize) -> Vec<String> {
        self.laid_out(&self.layout(Some(width)))
    }

    fn laid_out(&self, layout: &TableLayout) -> Vec<String> {
        let heads: Vec<String> = self.columns.iter().map(|it| it.head.to_owned()).collect();
        let rows = std::iter::once(&heads).chain(&self.rows);
        rows.flat_map(|row| self.row(row, &layout.shown)).collect()
    }

    fn layout(&self, width: Option<usize>) -> TableLayout {
        let full: Vec<usize> = (0..self.columns.len()).map(|it| self.widest(it)).collect();
        let room = width.unwrap_or(usize::MAX);
        let least = |at: usize| match self.columns[at].form {
            ColumnForm::Prose => full[at].min(PROSE_COLUMNS_MIN),
            ColumnForm::Text | ColumnForm::Number => full[at],
        };
        let needed = |shown: &[usize]| {
            let gaps = GAP.len() * shown.len().saturating_sub(1);
            shown.iter().map(|at| least(*at)).sum::<usize>() + gaps
        };
        let mut shown: Vec<usize> = (0..self.columns.len()).collect();
        let mut hidden = Vec::new();
        while needed(&shown) > room {
            let ranked = shown.iter().filter(|at| self.columns[**at].rank > 0);
            let Some(next) = ranked.max_by_key(|at| (self.rank_of(**at), **at)).copied() else {
                break;
            };
            shown.retain(|at| *at != next);
            hidden.push(next);
        }
        hidden.sort_unstable();
        let mut spare = room.saturating_sub(needed(&shown));
        let shown = shown.into_iter().map(|at| {
            let more = (full[at] - least(at)).min(spare);
            spare -= more;
            (at, least(at) + more)
        });
        TableLayout {
            shown: shown.collect(),
            hidden: hidden.into_iter().map(|at| self.columns[at].head).collect(),
        }
    }

    /// Returns the rank by which a column is hidden. A column without values is hidden first.
    fn rank_of(&self, at: usize) -> u8 {
        let is_empty = |row: &Vec<String>| matches!(row[at].as_str(), "" | "-");
        match self.rows.iter().all(is_empty) {
            true => u8::MAX,
            false => self.columns[at].rank,
        }
    }

    fn widest(&self, at: usize) -> usize {
        let cells = self.rows.iter().map(|row| row[at].width());
        cells.max().unwrap_or(0).max(self.columns[at].head.width())
    }

    fn row(&self, row: &[String], shown: &[(usize, usize)]) -> Vec<String> {
        let cell = |(at, width): &(usize, usize)| match self.columns[*at].form {
            ColumnForm::Prose => wrapped(&row[*at], *width),
            ColumnForm::Text | ColumnForm::Number => vec![row[*at].clone()],
        };
        let cells: Vec<Vec<String>> = shown.iter().map(cell).collect();
        let height = cells.iter().map(Vec::len).max().unwrap_or(0);
        let line = |nth: usize| {
            let parts = cells.iter().zip(shown).map(|(lines, (at, width))| {
                let text = lines.get(nth).map_or("", String::as_str);
                let blank = " ".repeat(width.saturating_sub(text.width()));
                match self.columns[*at].form {
                    ColumnForm::Number => format!("{blank}{text}"),
                    ColumnForm::Text | ColumnForm::Prose => format!("{text}{blank}"),
                }
            });
            parts.collect::<Vec<_>>().join(GAP).trim_end().to_owned()
        };
        (0..height).map(line).collect()
    }
}

impl fmt::Display for FittedTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(screen::columns()))
    }
}

/// Wraps a text to fit the terminal on stdout, each line indented by `indent` blanks.
#[must_use]
pub fn indented(text: &str, indent: usize) -> String {
    let width = screen::columns().map_or(usize::MAX, |columns| columns.saturating_sub(indent));
    let blank = " ".repeat(indent);
    let lines = wrapped(text, width);
    let lines: Vec<String> = lines.iter().map(|line| format!("{blank}{line}")).collect();
    lines.join("\n")
}

/// Wraps a text between words; a word wider than a line gets its own line.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    if text.width() <= width {
        return vec![text.to_owned()];
    }
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is a first line");
        if line.is_empty() {
            line.push_str(word);
        } else if line.width() + 1 + word.width() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engines() -> FittedTable {
        let mut table = FittedTable::new(&[
            column("id"),
            column("state"),
            column("url").rank(1),
            column("load").number().rank(2),
            column("kv").rank(1),
            column("detail").prose().rank(1),
        ]);
        let refused = "cannot connect to the engine: connection refused";
        table.add_row(["gpu-1", "healthy", "http://10.0.1.1:8000", "7", "-", "-"]);
        table.add_row([
            "gpu-2",
            "broken",
            "http://10.0.1.2:8000",
            "11",
            "-",
            refused,
        ]);
        table
    }

    #[test]
    fn a_pipe_gets_every_column() {
        let text = engines().text(None);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "id     state    url                   load  kv  detail",
                "gpu-1  healthy  http://10.0.1.1:8000     7  -   -",
                "gpu-2  broken   http://10.0.1.2:8000    11  -   cannot connect to the engine: connection refused",
            ]
        );
    }

    #[test]
    fn a_narrow_terminal_gets_fewer_columns_and_no_broken_words() {
        let text = engines().text(Some(71));
        assert_eq!(
            text.lines().collect::<Vec<_>>(),
            [
                "id     state    url                   detail",
                "gpu-1  healthy  http://10.0.1.1:8000  -",
                "gpu-2  broken   http://10.0.1.2:8000  cannot connect to the engine:",
                "                                      connection refused",
                "(not shown: load, kv; --wide shows them)",
            ]
        );
        for width in 0..120 {
            let text = engines().text(Some(width));
            let words = ["gpu-1", "gpu-2", "healthy", "broken"];
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
            let fits = |line: &str| line.width() <= width.max(14);
            let is_note = |line: &str| line.starts_with('(') || width < 40;
            assert!(
                text.lines().all(|it| fits(it) || is_note(it)),
                "{width}: {text}"
            );
        }
    }
}
