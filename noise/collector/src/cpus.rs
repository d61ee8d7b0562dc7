// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The CPUs that are measured: those that were asked for, or all that this process may use.

use std::collections::BTreeSet;

/// More than any kernel has, so that a list like `0-4294967295` costs nothing.
const MOST: u32 = 1 << 16;

/// Parses a list as Linux writes it: `0-3,8`.
fn parse(list: &str) -> Result<BTreeSet<u32>, String> {
    let wrong = || format!("'{list}' is no list of CPUs; write it like 0-3,8");
    let mut cpus = BTreeSet::new();
    for part in list.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |word: &str| -> Result<u32, String> {
            word.trim().parse().ok().filter(|cpu| *cpu < MOST).ok_or_else(wrong)
        };
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(wrong());
        }
        cpus.extend(first..=last);
    }
    if cpus.is_empty() { Err(wrong()) } else { Ok(cpus) }
}

fn show(cpus: &BTreeSet<u32>) -> String {
    let numbers: Vec<String> = cpus.iter().map(u32::to_string).collect();
    numbers.join(",")
}

/// The CPUs to measure, in ascending order.
///
/// # Errors
/// A CPU that is asked for does not exist, is offline, or is not this process's to use; the remedy is named.
pub fn choose(wanted: Option<&str>) -> Result<Vec<u32>, String> {
    let read = |name: &str| {
        let path = format!("/sys/devices/system/cpu/{name}");
        let text = std::fs::read_to_string(&path).map_err(|e| format!("{path} can't be read: {e}"))?;
        parse(&text)
    };
    let status =
        std::fs::read_to_string("/proc/self/status").map_err(|e| format!("/proc/self/status: {e}"))?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let allowed = parse(allowed.ok_or("/proc/self/status names no CPUs")?)?;
    check(wanted, &read("present")?, &read("online")?, &allowed)
}

fn check(
    wanted: Option<&str>,
    present: &BTreeSet<u32>,
    online: &BTreeSet<u32>,
    allowed: &BTreeSet<u32>,
) -> Result<Vec<u32>, String> {
    let Some(wanted) = wanted else { return Ok(allowed.iter().copied().collect()) };
    let wanted = parse(wanted)?;
    for cpu in &wanted {
        if !present.contains(cpu) {
            return Err(format!("there is no CPU {cpu}; this machine has the CPUs {}", show(present)));
        }
        if !online.contains(cpu) {
            return Err(format!(
                "CPU {cpu} is offline; switch it on: echo 1 >/sys/devices/system/cpu/cpu{cpu}/online"
            ));
        }
        if !allowed.contains(cpu) {
            return Err(format!(
                "CPU {cpu} is outside of this process's cpuset, which has the CPUs {}; run it in a cpuset with CPU {cpu}, \
                 or without the limit that taskset or a unit's AllowedCPUs= has set",
                show(allowed)
            ));
        }
    }
    Ok(wanted.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(list: &str) -> BTreeSet<u32> {
        parse(list).unwrap()
    }

    #[test]
    fn lists_are_read_as_linux_writes_them() {
        assert_eq!(set("0-2,8\n"), BTreeSet::from([0, 1, 2, 8]));
        for wrong in ["", "x", "3-1", "0-4294967295", "-1", "1-"] {
            assert!(parse(wrong).unwrap_err().contains("is no list of CPUs"), "{wrong}");
        }
    }

    #[test]
    fn a_cpu_that_can_not_be_measured_is_named_with_the_remedy() {
        let (present, online, allowed) = (set("0-3"), set("0-2"), set("0-1"));
        let check = |wanted| check(wanted, &present, &online, &allowed);
        assert_eq!(check(None).unwrap(), [0, 1]);
        assert_eq!(check(Some("1")).unwrap(), [1]);
        assert!(check(Some("3-4")).unwrap_err().contains("CPU 3 is offline"));
        assert!(
            check(Some("4")).unwrap_err().contains("there is no CPU 4; this machine has the CPUs 0,1,2,3")
        );
        assert!(check(Some("2")).unwrap_err().contains("outside of this process's cpuset"));
    }
}
