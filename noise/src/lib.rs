// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Noise: what interrupts programs that should have a CPU for themselves, measured and named by its cause.
//!
//! A static program, the *collector* (`collector/`), runs on the host or in a guest. A thread on each CPU does equal units of work and reads the
//! time-stamp counter after each: readings that are too far apart are *gaps*. Meanwhile the kernel records who has the CPU, into a buffer of the
//! collector's own and with the same clock. What it writes is read here ([`recording`], [`trace`]), the kernel's events become spans ([`timeline`]),
//! and each gap is divided between the spans that lie in it ([`attribute`]); what tracing took is taken off. Where a VM is measured, the
//! host's kernel records what holds up the vCPUs' threads; [`clock`] joins both by the guest's TSC offset.
//!
//! - [`recording`]: what the collector wrote.
//! - [`trace`]: the kernel's trace as it prints it.
//! - [`timeline`]: who had a CPU, or held up a thread, from when to when.
//! - [`attribute`]: the parts of gaps and whose they are.
//! - [`source`]: sources of noise and their remedies.
//! - [`report`]: the result, for JSON; [`table`] shows it as text, [`plot`] as a picture.
//! - [`model`]: what the noise would cost a bulk-synchronous program.
//! - [`clock`]: the time-stamp counters of guests.
//! - [`run`]: the collector on this host; [`cli`]: the command's options and output.

#![deny(missing_docs)]

pub mod attribute;
pub mod cli;
pub mod clock;
pub mod model;
pub mod plot;
pub mod recording;
pub mod report;
pub mod run;
pub mod source;
pub mod table;
pub mod timeline;
pub mod trace;
