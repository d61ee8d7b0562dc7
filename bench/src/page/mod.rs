// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The page of all results: one HTML file that needs nothing beside it.
//!
//! [`family`] puts cases that differ in one size together, [`chart`] draws such a family as lines, [`heat`] the matrix of fio;
//! this module writes the sections and the style around them. Colours are CSS variables, so a page is readable in dark and in
//! light; nothing is wider than a phone's screen but tables, which scroll.

use std::fmt::Write as _;

use crate::record::{About, Group, Machine, Recorded};
use crate::report::{Part, Table, figure, median};

mod chart;
mod family;
mod heat;

const STYLE: &str = include_str!("style.css");

/// The page of results files, each with its name, in their order.
#[must_use]
pub fn html(runs: &[(String, Recorded)]) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Tombolo: results of its benches</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <header><h1>Tombolo beside its peers</h1>\n<p>Every figure is a median over the repetitions of one run. A ratio of 2 \
         says that Tombolo is twice as good as the peer: twice the rate, or half the time.</p>\n<nav>"
    );
    for (name, _) in runs {
        let _ = write!(page, "<a href=\"#{0}\">{0}</a> ", escape(name));
    }
    page.push_str("</nav></header>\n<main>\n");
    for (name, run) in runs {
        section(name, run, &mut page);
    }
    page.push_str("</main>\n</body>\n</html>\n");
    page
}

fn section(name: &str, run: &Recorded, page: &mut String) {
    let table = Table::new(&run.samples);
    let _ = writeln!(page, "<section id=\"{0}\">\n<h2>{0}</h2>", escape(name));
    for machine in &run.machines {
        let _ = writeln!(page, "<p class=\"machine\">{}</p>", describe(machine));
    }
    for line in &run.left_out {
        let _ = writeln!(
            page,
            "<p class=\"left-out\">{} was left out: {}</p>",
            escape(&line.system),
            escape(&line.left_out)
        );
    }
    summary(&table, &run.abouts, page);
    systems(&run.abouts, page);
    let parts = table.parts();
    for Part { title, table } in &parts {
        heat::maps(table, title, page);
        let families = family::families(table);
        let drawn: Vec<String> = families
            .iter()
            .filter(|f| f.is_drawn())
            .map(|f| chart::lines(f, family::limit_of(f, &families), &table.systems))
            .collect();
        if !drawn.is_empty() {
            let _ = writeln!(page, "<div class=\"charts\">{}</div>", drawn.join("\n"));
        }
    }
    page.push_str("<details><summary>All medians</summary>");
    for part in &parts {
        medians(part, page);
    }
    page.push_str("</details>\n</section>\n");
}

/// Groups of systems in the order in which they are shown, each with its heading.
const GROUPS: [(Group, &str); 3] = [
    (Group::Coherent, "Shared between VMs, each sees at once what another wrote"),
    (Group::Cached, "Shared between VMs, with a cache in each: faster, and seen later"),
    (Group::Local, "Of one VM alone: the ceiling"),
];

/// What each system is and gives up, by group.
fn systems(abouts: &[About], page: &mut String) {
    for (group, heading) in GROUPS {
        // A file of several runs says it for each.
        let mut own: Vec<&About> = Vec::new();
        for about in abouts.iter().filter(|about| about.group == group) {
            if !own.contains(&about) {
                own.push(about);
            }
        }
        if own.is_empty() {
            continue;
        }
        let _ = writeln!(page, "<h3>{heading}</h3>\n<dl class=\"systems\">");
        for about in own {
            let _ = write!(page, "<dt>{}</dt><dd>{}", escape(&about.system), escape(&about.setup));
            if let Some(what) = &about.gives_up {
                let _ = write!(page, ". <b>Gives up:</b> {}", escape(what));
            }
            page.push_str("</dd>\n");
        }
        page.push_str("</dl>\n");
    }
}

/// The machine of a run, in a sentence.
fn describe(machine: &Machine) -> String {
    let Machine { command, commit, date, cpu, memory_mib, kernel, qemu, versions, settings } = machine;
    let mut text = format!("Measured on {}", escape(cpu));
    // 0: a run that did not note it.
    if *memory_mib > 0 {
        let _ = write!(text, ", {} GiB of memory", figure(*memory_mib as f64 / 1024.0));
    }
    let _ = write!(text, ", Linux {}", escape(kernel));
    if let Some(qemu) = qemu {
        let _ = write!(text, ", {}", escape(qemu));
    }
    let _ = write!(
        text,
        ", on {} at commit {} by <code>{}</code>.",
        escape(date),
        escape(commit),
        escape(command)
    );
    if let Some(settings) = settings {
        let _ = write!(text, " With {}.", escape(settings));
    }
    if !versions.is_empty() {
        let _ = write!(text, " Beside it: {}.", escape(&versions.join("; ")));
    }
    text
}

/// A row for each peer: how many times better Tombolo is, in the median, and between which ratios its cases lie; by group where the run says groups.
fn summary(table: &Table, abouts: &[About], page: &mut String) {
    let Some((own, peers)) = table.systems.split_first() else { return };
    let rows: Vec<(&String, Vec<f64>)> = peers
        .iter()
        .filter(|peer| !family::is_limit(peer))
        .map(|peer| (peer, table.ratios(own, peer).into_iter().map(|(_, ratio)| ratio).collect()))
        .filter(|(_, ratios): &(_, Vec<f64>)| !ratios.is_empty())
        .collect();
    if rows.is_empty() {
        return;
    }
    page.push_str(
        "<div class=\"scroll\"><table class=\"summary\"><thead><tr><th>peer</th><th>cases</th><th>median</th>\
         <th>least</th><th>most</th><th class=\"wide\">from least to most, a tick at the median, a line at 1</th></tr></thead><tbody>\n",
    );
    let bounds = rows
        .iter()
        .flat_map(|(_, ratios)| ratios)
        .fold((1.0_f64, 1.0_f64), |(low, high), ratio| (low.min(*ratio), high.max(*ratio)));
    let group = |peer: &str| abouts.iter().find(|about| about.system == peer).map(|about| about.group);
    let headings = GROUPS.iter().map(|(group, heading)| (Some(*group), *heading)).chain([(None, "")]);
    for (wanted, heading) in headings {
        let mut members = rows.iter().filter(|(peer, _)| group(peer) == wanted).peekable();
        if !heading.is_empty() && members.peek().is_some() {
            let _ = writeln!(
                page,
                "<tr class=\"group\"><th scope=\"rowgroup\" colspan=\"6\">{heading}</th></tr>"
            );
        }
        for (peer, ratios) in members {
            let mut ratios = ratios.clone();
            ratios.sort_by(f64::total_cmp);
            let middle = median(&ratios).unwrap_or(1.0);
            let (least, most) = (ratios[0], ratios[ratios.len() - 1]);
            let _ = writeln!(
                page,
                "<tr><th scope=\"row\">{}</th><td>{}</td><td><b>{}</b></td><td>{}</td><td>{}</td><td class=\"wide\">{}</td></tr>",
                escape(peer),
                ratios.len(),
                figure(middle),
                figure(least),
                figure(most),
                chart::span(bounds, least, middle, most)
            );
        }
    }
    page.push_str("</tbody></table></div>\n");
}

/// All medians of a part.
fn medians(Part { title, table }: &Part, page: &mut String) {
    if !title.is_empty() {
        let _ = write!(page, "<h3>{title}</h3>");
    }
    page.push_str("<div class=\"scroll\"><table><thead><tr><th>case</th><th>unit</th>");
    for system in &table.systems {
        let _ = write!(page, "<th>{}</th>", escape(system));
    }
    page.push_str("</tr></thead><tbody>\n");
    for case in &table.cases {
        let unit = table.unit(case).map_or("", |(unit, _)| unit);
        let _ = write!(page, "<tr><th scope=\"row\">{}</th><td>{}</td>", escape(case), escape(unit));
        for system in &table.systems {
            let shown = table.shown(case, system).unwrap_or_else(|| "–".to_owned());
            let _ = write!(page, "<td>{}</td>", escape(&shown));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody></table></div>\n");
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Better, LeftOut, Sample};

    fn sample(case: &str, system: &str, value: f64) -> Sample {
        Sample::new("t", case.into(), system, value, "MB/s", Better::Higher)
    }

    fn run(samples: Vec<Sample>) -> (String, Recorded) {
        let machine = Machine::here("tombolo bench <t>".into(), Some("tcg"), vec!["x 1".into()]);
        let left_out = vec![LeftOut { system: "nfs".into(), left_out: "no server".into() }];
        ("t".into(), Recorded { machines: vec![machine], samples, left_out, ..Recorded::default() })
    }

    #[test]
    fn a_page_has_machine_summary_lines_and_medians() {
        let mut samples = Vec::new();
        for (i, size) in ["4k", "16k", "128k", "2M"].iter().enumerate() {
            for op in ["read", "randwrite"] {
                let case = format!("fio-{op}-{size}-j1");
                samples.push(sample(&case, "tombolo", 100.0 * (i + 1) as f64));
                samples.push(sample(&case, "9p", 10.0));
            }
        }
        let page = html(&[run(samples)]);
        assert!(page.contains("by <code>tombolo bench &lt;t></code>"), "{page}");
        assert!(page.contains("nfs was left out: no server"));
        assert!(page.contains("<td><b>25.0</b></td><td>10.0</td><td>40.0</td>"), "{page}");
        assert_eq!(page.matches("class=\"lines\"").count(), 2);
        assert_eq!(page.matches("class=\"heat\"").count(), 1);
        assert!(page.contains("<th scope=\"row\">fio-read-2M-j1</th>"));
    }

    #[test]
    fn the_page_needs_nothing_from_a_network() {
        let page = html(&[run(vec![sample("x", "tombolo", 1.0)])]);
        for reference in ["http", "src=", "@import", "url("] {
            assert!(!page.contains(reference), "{reference} in {page}");
        }
    }

    #[test]
    fn cached_peers_stand_apart_with_what_they_give_up() {
        let about = |system: &str, group, gives_up: Option<&str>| About {
            system: system.into(),
            group,
            setup: "as usual".into(),
            gives_up: gives_up.map(str::to_owned),
        };
        let (name, mut run) = run(vec![
            sample("fio-read-4k-j1", "tombolo", 4.0),
            sample("fio-read-4k-j1", "9p", 1.0),
            sample("fio-read-4k-j1-buffered", "tombolo", 4.0),
            sample("fio-read-4k-j1-buffered", "virtiofs-always", 8.0),
        ]);
        run.abouts = vec![
            about("tombolo", Group::Coherent, None),
            about("virtiofs-always", Group::Cached, Some("what <others> wrote")),
            about("9p", Group::Coherent, None),
        ];
        let page = html(&[(name, run)]);
        let order =
            ["rowgroup", "<th scope=\"row\">9p</th>", "rowgroup", "<th scope=\"row\">virtiofs-always</th>"];
        let mut from = 0;
        for part in order {
            from += page[from..].find(part).unwrap_or_else(|| panic!("{part} does not follow: {page}")) + 1;
        }
        assert!(page.contains("<b>Gives up:</b> what &lt;others> wrote</dd>"), "{page}");
        assert!(page.contains("<h3>Buffered</h3>") && page.contains("<h3>With O_DIRECT</h3>"), "{page}");
    }
}
