// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The matrix of fio: for each peer a table of operations by block sizes, each cell Tombolo's ratio to the peer.

use std::fmt::Write as _;

use super::escape;
use super::family::{self, size};
use crate::report::{BUFFERED, Table, figure};

/// The maps of all peers in a part of a table with this title; nothing where no case is fio's.
pub fn maps(table: &Table, title: &str, page: &mut String) {
    let cells: Vec<(&str, &str, &String)> =
        table.cases.iter().filter_map(|case| parse(case).map(|(row, column)| (row, column, case))).collect();
    let Some((own, peers)) = table.systems.split_first().filter(|_| cells.len() >= 8) else { return };
    let (mut rows, mut columns): (Vec<String>, Vec<&str>) = (Vec::new(), Vec::new());
    for (_, column, case) in &cells {
        if !columns.contains(column) {
            columns.push(column);
        }
        let row = row_of(case, column);
        if !rows.contains(&row) {
            rows.push(row);
        }
    }
    columns.sort_by(|a, b| size(a).unwrap_or(0.0).total_cmp(&size(b).unwrap_or(0.0)));
    let of = if title.is_empty() { "" } else { ": " };
    let _ = writeln!(page, "<h3>{title}{of}Tombolo's ratio to each peer in fio</h3>\n<div class=\"maps\">");
    for peer in peers.iter().filter(|peer| !family::is_limit(peer)) {
        let ratios = table.ratios(own, peer);
        let _ = write!(page, "<table class=\"heat\"><caption>{}</caption><thead><tr><th></th>", escape(peer));
        for column in &columns {
            let _ = write!(page, "<th>{}</th>", escape(column));
        }
        page.push_str("</tr></thead><tbody>\n");
        let has = |row: &str| {
            let of_row = |case: &str| parse(case).is_some_and(|(_, column)| row_of(case, column) == *row);
            ratios.iter().any(|(case, _)| of_row(case))
        };
        for row in rows.iter().filter(|row| has(row)) {
            let _ = write!(page, "<tr><th scope=\"row\">{}</th>", escape(row));
            for column in &columns {
                let ratio = ratios.iter().find(|(case, _)| {
                    parse(case).is_some_and(|(_, c)| c == *column) && row_of(case, column) == *row
                });
                match ratio {
                    Some((_, ratio)) => {
                        let _ = write!(page, "<td class=\"{}\">{}</td>", shade(*ratio), figure(*ratio));
                    }
                    None => page.push_str("<td>–</td>"),
                }
            }
            page.push_str("</tr>\n");
        }
        page.push_str("</tbody></table>\n");
    }
    page.push_str("</div>\n");
}

/// The operation and the block size of one of fio's cases.
fn parse(case: &str) -> Option<(&str, &str)> {
    let mut words = case.strip_prefix("fio-")?.split('-');
    let (operation, block) = (words.next()?, words.next()?);
    size(block)?;
    Some((operation, block))
}

/// A case's row: its name without "fio", the block size, and what all cases of its part have in common.
fn row_of(case: &str, block: &str) -> String {
    let words = case.trim_end_matches(BUFFERED).split('-').skip(1).filter(|word| *word != block);
    words.collect::<Vec<&str>>().join(" ")
}

/// The class of a cell, from far worse to far better than the peer.
fn shade(ratio: f64) -> &'static str {
    match ratio {
        r if r < 0.5 => "worse2",
        r if r < 0.9 => "worse1",
        r if r < 1.1 => "same",
        r if r < 3.0 => "better1",
        r if r < 10.0 => "better2",
        _ => "better3",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_is_named_by_operation_jobs_and_block() {
        assert_eq!(parse("fio-randread-128k-j4"), Some(("randread", "128k")));
        assert_eq!(row_of("fio-randread-128k-j4", "128k"), "randread j4");
        assert_eq!(row_of("fio-randread-128k-j4-buffered", "128k"), "randread j4");
        assert_eq!(parse("meta-create"), None);
    }

    #[test]
    fn within_a_tenth_of_the_peer_is_the_same() {
        assert_eq!(
            [0.2, 0.8, 1.0, 2.0, 5.0, 64.0].map(shade),
            ["worse2", "worse1", "same", "better1", "better2", "better3"]
        );
    }
}
