// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The number by which a runtime makes sure that tables and devices are the driver's: HMAC (RFC 2104) with MD2 (RFC 1319) over the process, the thread, the addresses
//! of the tables, the time that the runtime said, and the devices' places.

use hmac::{Mac, SimpleHmac};
use md2::Md2;

/// The key that runtimes of CUDA 12 and 13 share with their drivers.
const KEY: [u8; 16] =
    [0x14, 0x6a, 0xdd, 0xae, 0x53, 0xa9, 0xa7, 0x52, 0xaa, 0x08, 0x41, 0x36, 0x0b, 0xf5, 0x5a, 0x9f];

/// What stands for a device: its UUID, and its PCI domain, bus and device.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    pub uuid: [u8; 16],
    pub place: [i32; 3],
}

/// The runtime's request for a proof.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// The version of the question, which says how it is answered.
    pub version: u32,
    pub seconds: u64,
    pub driver_version: u32,
    pub process: u32,
    pub thread: u32,
    /// The addresses of the runtime's table, of the table of this question, and of the function that answers it.
    pub addresses: [u64; 3],
}

/// The answer.
pub fn answer(question: &Question, devices: &[Device]) -> [u8; 16] {
    // Old versions of the question have one answer.
    let fixed = |first: u64| {
        let words = [first, 0x8ed3_83aa_1f4c_d1e8].map(u64::to_le_bytes);
        words.concat().try_into().unwrap_or_default()
    };
    match question.version % 10 {
        0 => return fixed(0x3341_181c_03cb_675c),
        1 => return fixed(0x1841_181c_03cb_675c),
        _ => {}
    }
    let Ok(mut mac) = SimpleHmac::<Md2>::new_from_slice(&KEY) else { return [0; 16] };
    for word in [question.driver_version, question.version, question.process, question.thread] {
        mac.update(&word.to_le_bytes());
    }
    for word in question.addresses.into_iter().chain([question.seconds]) {
        mac.update(&word.to_le_bytes());
    }
    for device in devices {
        mac.update(&device.uuid);
        device.place.iter().for_each(|n| mac.update(&n.to_le_bytes()));
    }
    mac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_depends_on_all_that_is_asked() {
        let question = Question {
            version: 12082,
            seconds: 1,
            driver_version: 12080,
            process: 2,
            thread: 3,
            addresses: [4, 5, 6],
        };
        let devices = [Device { uuid: [7; 16], place: [0, 2, 0] }];
        let first = answer(&question, &devices);
        assert_ne!(first, answer(&Question { thread: 4, ..question }, &devices));
        assert_ne!(first, answer(&Question { addresses: [4, 5, 7], ..question }, &devices));
        assert_ne!(first, answer(&question, &[]));
        assert_eq!(answer(&Question { version: 12080, ..question }, &devices)[..2], [0x5c, 0x67]);
    }
}
