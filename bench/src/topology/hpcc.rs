// SPDX-License-Identifier: Apache-2.0 OR MIT
//! HPC Challenge (package hpcc): its input, the script that runs it, and its figures. STREAM is one of its parts.

use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};

use crate::record::Better;

/// The figures that are recorded: hpcc's name, the case, the unit, units of ours in one of hpcc's, and which way is good. "Star" runs a part on all ranks at
/// once, each by itself.
const FIGURES: [(&str, &str, &str, f64, Better); 11] = [
    ("SingleSTREAM_Triad", "stream-triad-one", "MB/s", 1e3, Better::Higher),
    ("StarSTREAM_Triad", "stream-triad-each", "MB/s", 1e3, Better::Higher),
    ("StarDGEMM_Gflops", "dgemm-each", "Mflop/s", 1e3, Better::Higher),
    ("HPL_Tflops", "hpl", "Mflop/s", 1e6, Better::Higher),
    ("PTRANS_GBs", "ptrans", "MB/s", 1e3, Better::Higher),
    ("StarRandomAccess_GUPs", "random-access-each", "updates/s", 1e9, Better::Higher),
    ("MPIRandomAccess_GUPs", "random-access", "updates/s", 1e9, Better::Higher),
    ("MPIFFT_Gflops", "fft", "Mflop/s", 1e3, Better::Higher),
    ("AvgPingPongLatency_usec", "ping-pong", "us", 1.0, Better::Lower),
    ("AvgPingPongBandwidth_GBytes", "ping-pong-bandwidth", "MB/s", 1e3, Better::Higher),
    ("RandomlyOrderedRingLatency_usec", "ring", "us", 1.0, Better::Lower),
];

/// A figure of a run.
#[derive(Debug, PartialEq)]
pub struct Figure {
    /// The case: "stream-triad-each" …
    pub case: &'static str,
    /// The value, in `unit`.
    pub value: f64,
    /// Its unit.
    pub unit: &'static str,
    /// The direction of better values.
    pub better: Better,
}

/// The order of the largest matrix that, for all ranks together, takes at most a fifth of `memory` bytes; a multiple of the block size.
#[must_use]
pub fn order_for(memory: u64) -> u32 {
    let order = (memory as f64 / 5.0 / 8.0).sqrt() as u32;
    (order / BLOCK).max(1) * BLOCK
}

/// Columns of a block of the matrix.
const BLOCK: u32 = 80;

/// A shell script that runs hpcc with `ranks` ranks, one on each CPU that it may use, on matrices of `order`, and prints the summary.
#[must_use]
pub fn script(ranks: u32, order: u32) -> String {
    let mut text = String::from("set -e\ndir=$(mktemp -d)\ntrap 'rm -rf \"$dir\"' EXIT\ncd \"$dir\"\n");
    let _ = write!(
        text,
        "cat >hpccinf.txt <<'END'\n{}END\n\
         export HOME=\"${{HOME:-$dir}}\" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\n\
         mpirun -np {ranks} --use-hwthread-cpus --bind-to hwthread --mca plm isolated --mca btl self,vader hpcc >log 2>&1 || {{ cat log >&2; exit 1; }}\n\
         sed -n '/^Begin of Summary/,/^End of Summary/p' hpccoutf.txt\n",
        input(ranks, order)
    );
    text
}

/// The file hpccinf.txt. Lines are recognized by their places; the words behind the values are comments.
pub fn input(ranks: u32, order: u32) -> String {
    let rows = (1..=ranks.isqrt()).rev().find(|rows| ranks % rows == 0).unwrap_or(1);
    let values = [
        "HPC Challenge".to_owned(),
        "-".to_owned(),
        "HPL.out output file".to_owned(),
        "8 output to the file".to_owned(),
        "1 order".to_owned(),
        format!("{order}"),
        "1 block size".to_owned(),
        format!("{BLOCK}"),
        "0 ranks by rows".to_owned(),
        "1 grid of ranks".to_owned(),
        format!("{rows}"),
        format!("{}", ranks / rows),
        "16.0 threshold".to_owned(),
        "1 panel factorization".to_owned(),
        "2".to_owned(),
        "1 end of the recursion".to_owned(),
        "4".to_owned(),
        "1 panels in the recursion".to_owned(),
        "2".to_owned(),
        "1 recursive factorization".to_owned(),
        "1".to_owned(),
        "1 broadcast".to_owned(),
        "1".to_owned(),
        "1 look-ahead".to_owned(),
        "1".to_owned(),
        "2 swapping".to_owned(),
        "64 swapping threshold".to_owned(),
        "0 L1 transposed".to_owned(),
        "0 U transposed".to_owned(),
        "1 equilibration".to_owned(),
        "8 alignment in doubles".to_owned(),
        "-".to_owned(),
        "0 further orders for PTRANS".to_owned(),
        "-".to_owned(),
        "0 further block sizes for PTRANS".to_owned(),
        "-".to_owned(),
    ];
    values.join("\n") + "\n"
}

/// The figures of a summary. A part that `ranks` ranks can't measure, as the latency between one, has none.
///
/// # Errors
/// The run failed, or its results are wrong.
pub fn figures(summary: &str) -> Result<Vec<Figure>> {
    let value = |name: &str| {
        summary
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix('=')?.trim().parse::<f64>().ok())
    };
    ensure!(value("Success") == Some(1.0), "hpcc reports no success: {summary}");
    let ranks = value("CommWorldProcs").context("hpcc's summary has no CommWorldProcs")?;
    let mut figures = Vec::new();
    for (name, case, unit, factor, better) in FIGURES {
        let value = value(name).with_context(|| format!("hpcc's summary has no {name}"))? * factor;
        if value.is_finite() && value > 0.0 {
            figures.push(Figure { case, value, unit, better });
        } else {
            let needs_peers = name.contains("PingPong") || name.contains("Ring");
            ensure!(needs_peers && ranks < 2.0, "hpcc measured {name}={value}");
        }
    }
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines of a summary as hpcc 1.5.0 writes it, with two ranks.
    const SUMMARY: &str = "Begin of Summary section.\nVersionMajor=1\nSuccess=1\nCommWorldProcs=2\nHPL_Tflops=0.000233746\nStarDGEMM_Gflops=0.631916\n\
        PTRANS_GBs=0.0113059\nMPIRandomAccess_LCG_GUPs=0.000958445\nMPIRandomAccess_GUPs=0.00132859\nStarRandomAccess_GUPs=0.788506\n\
        StarSTREAM_Triad=72.5099\nSingleSTREAM_Triad=74.293\nMPIFFT_Gflops=3.95094\nRandomlyOrderedRingLatency_usec=0.280445\n\
        AvgPingPongLatency_usec=0.351764\nAvgPingPongBandwidth_GBytes=14.2206\nEnd of Summary section.\n";

    #[test]
    fn a_summary_has_all_figures_in_units_that_can_be_read() {
        let figures = figures(SUMMARY).unwrap();
        assert_eq!(figures.len(), FIGURES.len());
        let of = |case: &str| figures.iter().find(|figure| figure.case == case).unwrap();
        let near =
            |case: &str, value: f64| assert!((of(case).value / value - 1.0).abs() < 1e-9, "{:?}", of(case));
        near("stream-triad-each", 72_509.9);
        near("hpl", 233.746);
        near("random-access", 1_328_590.0);
        assert_eq!(of("stream-triad-each").unit, "MB/s");
        assert_eq!((of("ping-pong").value, of("ping-pong").better), (0.351_764, Better::Lower));
    }

    #[test]
    fn a_rank_alone_has_no_latency_and_a_run_that_failed_no_figures() {
        let alone = SUMMARY
            .replace("CommWorldProcs=2", "CommWorldProcs=1")
            .replace("Latency_usec=0", "Latency_usec=-0")
            .replace("GBytes=14", "GBytes=-14");
        let cases: Vec<&str> = figures(&alone).unwrap().iter().map(|figure| figure.case).collect();
        assert_eq!(cases.len(), FIGURES.len() - 3);
        assert!(!cases.contains(&"ring"), "{cases:?}");

        let wrong = SUMMARY.replace("PTRANS_GBs=0", "PTRANS_GBs=-0");
        assert!(figures(&wrong).unwrap_err().to_string().contains("hpcc measured PTRANS_GBs=-11.3059"));
        let failed = SUMMARY.replace("Success=1", "Success=0");
        assert!(figures(&failed).unwrap_err().to_string().contains("reports no success"));
        assert!(figures("").is_err());
    }

    #[test]
    fn the_grid_of_ranks_is_as_square_as_it_gets() {
        let grid = |ranks: u32| {
            let text = input(ranks, 800);
            let lines: Vec<&str> = text.lines().collect();
            assert_eq!((lines[5], lines[7], lines.len()), ("800", "80", 36));
            (lines[10].to_owned(), lines[11].to_owned())
        };
        assert_eq!(grid(1), ("1".into(), "1".into()));
        assert_eq!(grid(2), ("1".into(), "2".into()));
        assert_eq!(grid(12), ("3".into(), "4".into()));
        assert_eq!(grid(7), ("1".into(), "7".into()));
    }

    #[test]
    fn a_matrix_takes_a_fifth_of_the_memory() {
        assert_eq!(order_for(2 << 30), 7280);
        assert_eq!(order_for(0), 80);
    }
}
