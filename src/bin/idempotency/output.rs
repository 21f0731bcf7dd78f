//! What is printed: tables for people, JSON for scripts.

use std::io::{self, IsTerminal as _, Write as _};

use serde::Serialize;
use tower_idempotency::admin::misleads;

/// Whether colour is used: on a terminal, and not where `NO_COLOR` asks for none (<https://no-color.org>).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Paint {
    Coloured,
    Plain,
}

/// What a cell is to be noticed for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Tone {
    Plain,
    /// Somebody has to do something.
    Alarm,
    Good,
    Faint,
}

impl Paint {
    /// For standard output.
    pub fn of_output() -> Self {
        let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
            || std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        match io::stdout().is_terminal() && !unwanted {
            true => Self::Coloured,
            false => Self::Plain,
        }
    }

    fn paint(self, text: &str, tone: Tone) -> String {
        let code = match (self, tone) {
            (Self::Plain, _) | (_, Tone::Plain) => return text.to_owned(),
            (Self::Coloured, Tone::Alarm) => "31;1",
            (Self::Coloured, Tone::Good) => "32",
            (Self::Coloured, Tone::Faint) => "2",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// A cell of a table.
pub struct Cell {
    text: String,
    tone: Tone,
}

/// A plain cell.
pub fn cell(text: impl Into<String>) -> Cell {
    toned(text, Tone::Plain)
}

/// A cell with a tone.
pub fn toned(text: impl Into<String>, tone: Tone) -> Cell {
    Cell { text: harmless(&text.into()), tone }
}

/// Without what would move a terminal's cursor, or worse.
pub fn harmless(text: &str) -> String {
    let shown = |letter: char| match letter {
        letter if letter.is_control() || misleads(letter) => letter.escape_default().collect(),
        letter => String::from(letter),
    };
    text.chars().map(shown).collect()
}

/// Rows in columns that are as wide as their widest cell.
pub fn table(paint: Paint, head: &[&str], rows: &[Vec<Cell>]) -> String {
    let width = |text: &str| text.chars().count();
    let columns = rows.iter().map(Vec::len).chain([head.len()]).max().unwrap_or(0);
    let mut widths = vec![0; columns];
    for (column, name) in widths.iter_mut().zip(head) {
        *column = width(name);
    }
    for row in rows {
        for (column, cell) in widths.iter_mut().zip(row) {
            *column = (*column).max(width(&cell.text));
        }
    }
    let mut lines = String::new();
    let mut line = |cells: &mut dyn Iterator<Item = (&str, Tone)>| {
        let mut padding = 0;
        for (index, (text, tone)) in cells.enumerate() {
            lines.push_str(&" ".repeat(padding));
            lines.push_str(&paint.paint(text, tone));
            // Nothing trails the last column.
            padding = widths.get(index).map_or(0, |column| column.saturating_sub(width(text)) + 2);
        }
        lines.push('\n');
    };
    if !head.is_empty() {
        line(&mut head.iter().map(|name| (*name, Tone::Faint)));
    }
    for row in rows {
        line(&mut row.iter().map(|cell| (cell.text.as_str(), cell.tone)));
    }
    lines
}

/// Writes to standard output. Whoever reads it may have gone away; that is no failure of ours, a full disk is.
pub fn print(text: &str) -> Result<(), String> {
    let mut output = io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(format!("cannot write to standard output: {error}"))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Writes JSON and a line end.
pub fn print_json(value: &impl Serialize) -> Result<(), String> {
    let text = serde_json::to_string_pretty(value).map_err(|error| error.to_string())?;
    // As JSON escapes them: they can stand in its strings only.
    let escaped = |letter: char| match misleads(letter) {
        true => {
            letter.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect()
        }
        false => String::from(letter),
    };
    print(&(text.chars().map(escaped).collect::<String>() + "\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_nothing_trails() {
        let rows = vec![vec![cell("a"), cell("x")], vec![cell("längst"), toned("y", Tone::Alarm)]];
        let plain = table(Paint::Plain, &["ONE", "TWO"], &rows);
        assert_eq!(plain, "ONE     TWO\na       x\nlängst  y\n");
        let coloured = table(Paint::Coloured, &[], &rows);
        assert_eq!(coloured, "a       x\nlängst  \u{1b}[31;1my\u{1b}[0m\n");
    }

    #[test]
    fn a_cell_cannot_write_over_the_screen() {
        let rows = vec![vec![cell("\u{1b}[2Jgone\n")]];
        assert_eq!(table(Paint::Plain, &[], &rows), "\\u{1b}[2Jgone\\n\n");
        assert_eq!(harmless("pay\u{202e}001\u{200b}"), "pay\\u{202e}001\\u{200b}");
    }
}
