//! Plain tables.

/// A table's rows, as they are printed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Table {
    title: String,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new<const N: usize>(title: &str, columns: [&str; N]) -> Self {
        Self { title: title.to_owned(), rows: vec![columns.map(str::to_owned).to_vec()] }
    }

    pub(super) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.to_vec());
    }

    pub(super) fn print(&self) {
        let columns = self.rows[0].len();
        let width =
            |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<_> = (0..columns).map(width).collect();
        println!("\n{}\n", self.title);
        for row in &self.rows {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}"));
            println!("  {}", cells.collect::<Vec<_>>().join("  "));
        }
    }
}

/// Three digits that mean something.
pub(super) fn number(number: f64) -> String {
    match number.abs() {
        n if n >= 100.0 || n == 0.0 => format!("{number:.0}"),
        n if n >= 10.0 => format!("{number:.1}"),
        n if n >= 0.1 => format!("{number:.2}"),
        _ => format!("{number:.4}"),
    }
}
