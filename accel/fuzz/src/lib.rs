// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A client that says anything, for libFuzzer: `run.sh`.
//!
//! The first byte of an input chooses. Even: what follows is the body of one function's record, taken as it is: what decodes must encode to
//! what decodes to the same. Odd: the rest is a source of numbers from which requests are made that decode, with values that
//! may make no sense; a session carries them out, with checks and tables as in a worker, on a driver that does nothing but touch
//! the memory it is given.
//!
//! - [`driver`]: that driver.
//! - [`client`]: the session, its link and its window.

pub mod client;
pub mod driver;

use client::Client;
use std::sync::{Mutex, OnceLock};
use tombolo_accel_spec::opencl::{FUNCTIONS, recode};

/// The most requests of an input.
const REQUESTS: usize = 24;

/// Numbers out of bytes: most are small, some are whole words, some are close to the largest.
pub struct Numbers<'d>(&'d [u8]);

impl Numbers<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn next(&mut self) -> u64 {
        match self.byte() {
            None => 0,
            Some(b @ 0..=199) => u64::from(b),
            Some(b @ 200..=229) => u64::from(self.byte().unwrap_or(0)) << (b - 200),
            Some(b @ 230..=239) => u64::MAX - u64::from(b - 230),
            Some(b @ 240..=244) => (1 << 32) - u64::from(b - 240),
            Some(_) => (0..8).fold(0, |n, _| n << 8 | u64::from(self.byte().unwrap_or(0))),
        }
    }
}

fn records(body: &[u8]) {
    let Some((which, body)) = body.split_first() else { return };
    let (id, name) = FUNCTIONS[*which as usize % FUNCTIONS.len()];
    let (mut once, mut twice) = (Vec::new(), Vec::new());
    if let Some(Ok(())) = recode(id, body, &mut once) {
        assert_eq!(once.len(), body.len(), "{name}");
        assert_eq!(recode(id, &once, &mut twice), Some(Ok(())), "{name}");
        assert_eq!(once, twice, "{name}");
    }
}

fn requests(bytes: &[u8]) {
    // One session for all inputs: a driver's state is never freed. Each input finds it as the first did.
    static CLIENT: OnceLock<Mutex<Client>> = OnceLock::new();
    let client = CLIENT.get_or_init(|| Mutex::new(Client::new()));
    let mut client = client.lock().expect("a panic ends the process");
    client.begin();
    let mut numbers = Numbers(bytes);
    for _ in 0..REQUESTS {
        let (Some(which), Some(waits)) = (numbers.byte(), numbers.byte()) else { break };
        let (id, _) = FUNCTIONS[which as usize % FUNCTIONS.len()];
        let mut body = Vec::new();
        if tombolo_accel_spec::opencl::make(id, &mut || numbers.next(), &mut body) {
            client.request(id, waits % 2 == 1, &body);
        }
    }
    client.end();
}

/// One input.
pub fn one(input: &[u8]) {
    match input.split_first() {
        Some((mode, rest)) if mode % 2 == 0 => records(rest),
        Some((_, rest)) => requests(rest),
        None => {}
    }
}

tombolo_fuzz::entry!(one);

#[cfg(test)]
mod tests {
    use tombolo_fuzz::bytes;

    #[test]
    fn no_input_makes_a_session_panic_or_lets_the_driver_leave_the_window() {
        for seed in 1..=300u64 {
            let input: Vec<u8> = bytes(seed).take(200).collect();
            super::one(&input);
        }
    }
}
