// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The picture of a measurement, as SVG: when gaps were and how long, by their largest source; and how many quanta of fixed work took longer than
//! what, without and with tracing.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::report::Measured;
use crate::source::Source;

const SIZE: (u32, u32) = (1100, 800);
const UPPER: u32 = 420;
/// Sources with a colour of their own; the others share one.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 90, 160),
    RGBColor(200, 80, 0),
    RGBColor(0, 130, 70),
    RGBColor(170, 0, 60),
    RGBColor(110, 60, 160),
    RGBColor(120, 90, 0),
    RGBColor(0, 130, 140),
    RGBColor(190, 60, 150),
];
const OTHERS: RGBColor = RGBColor(90, 90, 90);
/// Points of a gap that are drawn: more can't be told apart.
const MOST_POINTS: usize = 5000;

/// Draws it.
///
/// # Errors
/// The picture can't be drawn, which no measurement is known to cause.
pub fn svg(measured: &Measured) -> Result<String> {
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        let draw = || -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
            root.fill(&WHITE)?;
            let (upper, lower) = root.split_vertically(UPPER);
            series(&upper, measured)?;
            distribution(&lower, measured)?;
            root.present()
        };
        draw().map_err(|e| anyhow!("the picture can't be drawn: {e}"))?;
    }
    Ok(text)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// A gap as a point: seconds since the begin, microseconds, its largest source.
type Point<'a> = (f64, f64, Option<&'a Source>);

fn points(measured: &Measured) -> Vec<Point<'_>> {
    let begin = measured.gaps.iter().map(|(record, _)| record.first).min().unwrap_or(0);
    let us = |ticks: u64| ticks as f64 * 1e6 / measured.hz as f64;
    let all = measured.gaps.iter().flat_map(|(_, gaps)| gaps);
    let mut points: Vec<Point<'_>> = all
        .map(|one| {
            let largest = one.parts.iter().max_by_key(|part| part.ticks).map(|part| &part.source);
            (us(one.gap.start - begin) / 1e6, us(one.gap.end - one.gap.start), largest)
        })
        .collect();
    points.sort_by(|a, b| b.1.total_cmp(&a.1));
    points.truncate(MOST_POINTS);
    points
}

fn series(area: &Area<'_>, measured: &Measured) -> Drawn {
    let points = points(measured);
    let longest = points.first().map_or(1.0, |point| point.1).max(measured.report.threshold_us * 2.0);
    let least = measured.report.threshold_us.min(longest / 2.0);
    let title = format!("{}: interruptions by their largest source", measured.report.target);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..measured.report.seconds.max(0.001), (least..longest * 1.2).log_scale())?;
    chart.configure_mesh().x_desc("seconds").y_desc("microseconds").light_line_style(WHITE).draw()?;
    let sources: Vec<&Source> = measured.report.sources.iter().map(|row| &row.source).collect();
    let named = &sources[..sources.len().min(COLOURS.len())];
    for (source, colour) in named.iter().zip(COLOURS) {
        let of = points.iter().filter(|point| point.2 == Some(*source));
        chart
            .draw_series(of.map(|point| Circle::new((point.0, point.1), 2, colour.filled())))?
            .label(source.to_string())
            .legend(move |at| Circle::new((at.0 + 10, at.1), 4, colour.filled()));
    }
    let others = points.iter().filter(|point| point.2.is_none_or(|source| !named.contains(&source)));
    chart.draw_series(others.map(|point| Circle::new((point.0, point.1), 2, OTHERS.filled())))?;
    if !named.is_empty() {
        legend(&mut chart)?;
    }
    Ok(())
}

fn distribution(area: &Area<'_>, measured: &Measured) -> Drawn {
    let phases = [
        ("without tracing", &measured.plain_us, COLOURS[0]),
        ("with tracing", &measured.traced_us, COLOURS[1]),
    ];
    let all = || phases.iter().flat_map(|(_, values, _)| values.iter().copied());
    let (least, most) = (all().fold(f64::MAX, f64::min), all().fold(0.0, f64::max));
    if most <= 0.0 {
        return Ok(());
    }
    let count = phases.iter().map(|(_, values, _)| values.len()).max().unwrap_or(1).max(2);
    let mut chart = ChartBuilder::on(area)
        .caption("quanta of fixed work that took longer", ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .build_cartesian_2d(
            (least..most.max(least * 1.01)).log_scale(),
            (0.5 / count as f64..1.0).log_scale(),
        )?;
    chart.configure_mesh().x_desc("microseconds").y_desc("share").light_line_style(WHITE).draw()?;
    for (name, values, colour) in phases.into_iter().filter(|(_, values, _)| !values.is_empty()) {
        let mut sorted = values.clone();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len() as f64;
        let step = sorted.len().div_ceil(MOST_POINTS);
        // The longest quanta are all drawn.
        let kept = sorted.iter().enumerate().filter(|(at, _)| at % step == 0 || sorted.len() - at < 100);
        let line = kept.map(|(at, us)| (*us, 1.0 - at as f64 / count));
        chart
            .draw_series(LineSeries::new(line, colour.stroke_width(2)))?
            .label(name)
            .legend(move |at| Circle::new((at.0 + 10, at.1), 4, colour.filled()));
    }
    legend(&mut chart)
}

fn legend<'a, C: CoordTranslate>(chart: &mut ChartContext<'a, SVGBackend<'a>, C>) -> Drawn {
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(OTHERS).draw()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribute::{Explained, Part};
    use crate::recording::{Gap, Record, Recording};
    use crate::report::{Below, report};
    use crate::source::Kind;

    #[test]
    fn a_picture_has_the_gaps_their_sources_and_both_distributions() {
        let record =
            Record { cpu: 0, last: 1_000_000_000, work: vec![1_000_000, 1_000_500], ..Record::default() };
        let recording = Recording {
            hz: 1_000_000_000,
            plain: vec![record.clone()],
            traced: vec![Record { gaps: vec![Gap { start: 5, end: 300_005, smis: 0 }], ..record }],
            ..Recording::default()
        };
        let mut measured = report("solver", 5.0, &recording, &Below::default(), None);
        let picture = svg(&measured).unwrap();
        assert!(picture.starts_with("<svg") && picture.ends_with("</svg>\n"), "{picture}");
        for words in
            ["solver: interruptions", "unknown", "seconds", "without tracing", "with tracing", "<polyline"]
        {
            assert!(picture.contains(words), "{words}");
        }
        // A source beyond those with a colour is drawn too.
        let rare = Source::here(Kind::Thread, "rare");
        let gap = Gap { start: 10, end: 20, smis: 0 };
        let explained = Explained { gap, parts: vec![Part { source: rare, ticks: 10 }], tracing: 0 };
        measured.gaps[0].1.push(explained);
        let circles = |picture: &str| picture.matches("<circle").count();
        assert_eq!(circles(&svg(&measured).unwrap()), circles(&picture) + 1);
    }

    #[test]
    fn a_measurement_without_gaps_and_quanta_has_a_picture() {
        let recording = Recording { hz: 1_000_000_000, ..Recording::default() };
        assert!(svg(&report("host", 5.0, &recording, &Below::default(), None)).unwrap().contains("</svg>"));
    }
}
