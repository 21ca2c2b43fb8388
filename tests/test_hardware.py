"""Threads and memory limits, on made-up /proc and /sys trees."""

import os

import pytest

from engine import hardware

GIB = 1 << 30


class Machine:
    """A made-up machine below a directory: CPUs with hyper-threads, cgroup mounts, limits, memory."""

    def __init__(self, root, groups=("0::/",), mounts=(), mem_available_kib=8 << 20):
        self.root = root
        self.write("proc/self/cgroup", "\n".join(groups) + "\n")
        lines = []
        for number, (kind, mounted, point, options) in enumerate(mounts):
            lines.append(
                f"{30 + number} 23 0:{28 + number} {mounted} {point} rw,relatime shared:9 - {kind} x rw,{options}"
            )
        self.write("proc/self/mountinfo", "\n".join(lines) + "\n")
        self.write("proc/meminfo", f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {mem_available_kib} kB\n")

    def write(self, path, text):
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def cpus(self, siblings, name="thread_siblings_list"):
        """One entry per logical CPU: the kernel's list of its core's threads."""
        self.write("sys/devices/system/cpu/online", f"0-{len(siblings) - 1}\n")
        for cpu, text in enumerate(siblings):
            self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/{name}", text + "\n")


V2 = ("cgroup2", "/", "/sys/fs/cgroup", "nsdelegate")
V1_CPU = ("cgroup", "/", "/sys/fs/cgroup/cpu,cpuacct", "cpu,cpuacct")
V1_MEMORY = ("cgroup", "/", "/sys/fs/cgroup/memory", "memory")


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", {0}), ("0-3", {0, 1, 2, 3}), ("0,4", {0, 4}), ("0-1,8,10-11\n", {0, 1, 8, 10, 11}), ("", set())],
)
def test_cpu_list_of_the_kernel_is_parsed(text, cpus):
    assert hardware.parse_cpu_list(text) == cpus


@pytest.mark.parametrize("name", ["thread_siblings_list", "core_cpus_list"])
def test_hyperthreads_count_once(tmp_path, name):
    machine = Machine(tmp_path)
    machine.cpus(["0,4", "1,5", "2,6", "3,7"] * 2, name)
    plan = hardware.usable_cpus(tmp_path, set(range(8)))
    assert (plan.count, plan.cpus) == (4, (0, 1, 2, 3))
    assert "physical" in plan.reason


def test_adjacent_hyperthreads_count_once(tmp_path):
    Machine(tmp_path).cpus(["0-1", "0-1", "2-3", "2-3"])
    assert hardware.usable_cpus(tmp_path, {0, 1, 2, 3}).cpus == (0, 2)


def test_affinity_mask_limits_cores_not_siblings(tmp_path):
    """Two threads of one core are one core; the second thread of a core we may not use otherwise is one, too."""
    Machine(tmp_path).cpus(["0,4", "1,5", "2,6", "3,7"] * 2)
    plan = hardware.usable_cpus(tmp_path, {0, 4, 5})
    assert plan.cpus == (0, 5)
    assert "affinity" in plan.reason


def test_cpus_without_topology_are_cores(tmp_path):
    Machine(tmp_path)
    assert hardware.usable_cpus(tmp_path, {0, 1, 2}).count == 3


def test_affinity_of_this_process_is_the_default(tmp_path):
    Machine(tmp_path)
    assert hardware.usable_cpus(tmp_path).num_allowed == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("cpu_max", "count"),
    [("max 100000", 4), ("150000 100000", 1), ("200000 100000", 2), ("299999 100000", 2), ("50000 100000", 1)],
)
def test_v2_quota_is_rounded_down_to_at_least_one(tmp_path, cpu_max, count):
    machine = Machine(tmp_path, ["0::/job"], [V2])
    machine.cpus(["0", "1", "2", "3"])
    machine.write("sys/fs/cgroup/job/cpu.max", cpu_max + "\n")
    assert hardware.usable_cpus(tmp_path, {0, 1, 2, 3}).count == count


def test_v2_quota_of_an_ancestor_counts(tmp_path):
    machine = Machine(tmp_path, ["0::/pods/one/container"], [V2])
    machine.write("sys/fs/cgroup/pods/one/container/cpu.max", "max 100000")
    machine.write("sys/fs/cgroup/pods/one/cpu.max", "800000 100000")
    machine.write("sys/fs/cgroup/pods/cpu.max", "200000 100000")
    plan = hardware.usable_cpus(tmp_path, set(range(16)))
    assert plan.count == 2
    assert "/pods " in plan.reason
    assert [quota.cpus for quota in plan.quotas] == [8, 2]


@pytest.mark.parametrize(("quota", "count"), [("-1", 8), ("150000", 1), ("400000", 4)])
def test_v1_quota(tmp_path, quota, count):
    machine = Machine(tmp_path, ["4:memory:/", "3:cpu,cpuacct:/docker/abc", "0::/"], [V1_CPU])
    machine.write("sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us", quota)
    machine.write("sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us", "100000")
    assert hardware.usable_cpus(tmp_path, set(range(8))).count == count


def test_v1_quota_of_an_ancestor_counts(tmp_path):
    machine = Machine(tmp_path, ["3:cpu,cpuacct:/batch/abc"], [V1_CPU])
    machine.write("sys/fs/cgroup/cpu,cpuacct/batch/cpu.cfs_quota_us", "150000")
    machine.write("sys/fs/cgroup/cpu,cpuacct/batch/cpu.cfs_period_us", "50000")
    assert hardware.usable_cpus(tmp_path, set(range(8))).count == 3


def test_container_mount_shows_the_subtree_we_are_in(tmp_path):
    """In a container without its own cgroup namespace the name is the host's and the mount starts below it."""
    mount = ("cgroup2", "/docker/abc", "/sys/fs/cgroup", "")
    machine = Machine(tmp_path, ["0::/docker/abc/inner"], [mount])
    machine.write("sys/fs/cgroup/inner/cpu.max", "300000 100000")
    machine.write("sys/fs/cgroup/cpu.max", "200000 100000")
    assert hardware.usable_cpus(tmp_path, set(range(8))).count == 2


def test_name_outside_of_the_mount_means_its_root(tmp_path):
    machine = Machine(tmp_path, ["0::/../other"], [("cgroup2", "/docker/abc", "/sys/fs/cgroup", "")])
    machine.write("sys/fs/cgroup/cpu.max", "200000 100000")
    assert hardware.usable_cpus(tmp_path, set(range(8))).count == 2


def test_memory_without_cgroups_is_mem_available(tmp_path):
    Machine(tmp_path, groups=())
    plan = hardware.memory_limits(tmp_path)
    assert (plan.total_bytes, plan.available_bytes, plan.limits) == (16 * GIB, 8 * GIB, ())


def test_v2_memory_limit_of_every_level(tmp_path):
    machine = Machine(tmp_path, ["0::/a/b"], [V2])
    machine.write("sys/fs/cgroup/a/b/memory.max", "max")
    machine.write("sys/fs/cgroup/a/b/memory.high", str(5 * GIB))
    machine.write("sys/fs/cgroup/a/b/memory.current", str(GIB))
    machine.write("sys/fs/cgroup/a/memory.max", str(3 * GIB))
    machine.write("sys/fs/cgroup/a/memory.current", str(2 * GIB))
    machine.write("sys/fs/cgroup/a/memory.stat", f"anon 1\nactive_file 7\ninactive_file {GIB}\n")
    plan = hardware.memory_limits(tmp_path)
    assert [(limit.cgroup, limit.setting, limit.limit_bytes) for limit in plan.limits] == [
        ("/a/b", "memory.high", 5 * GIB),
        ("/a", "memory.max", 3 * GIB),
    ]
    # 3 GiB less 2 GiB in use, of which 1 GiB is page cache that the kernel can drop.
    assert plan.available_bytes == 2 * GIB


def test_v1_memory_limit_and_the_hidden_ancestor(tmp_path):
    machine = Machine(tmp_path, ["4:memory:/job", "0::/"], [V1_MEMORY])
    group = "sys/fs/cgroup/memory/job/"
    machine.write(group + "memory.limit_in_bytes", str(6 * GIB))
    machine.write(group + "memory.usage_in_bytes", str(GIB))
    machine.write(group + "memory.stat", f"hierarchical_memory_limit {4 * GIB}\ntotal_inactive_file {GIB // 2}\n")
    (limit,) = hardware.memory_limits(tmp_path).limits
    assert (limit.version, limit.limit_bytes, limit.available_bytes) == (1, 4 * GIB, 4 * GIB - GIB // 2)


def test_v1_unlimited_is_no_limit(tmp_path):
    machine = Machine(tmp_path, ["4:memory:/"], [V1_MEMORY])
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    assert hardware.memory_limits(tmp_path).limits == ()


def test_limit_below_usage_leaves_nothing(tmp_path):
    machine = Machine(tmp_path, ["0::/"], [V2])
    machine.write("sys/fs/cgroup/memory.max", str(GIB))
    machine.write("sys/fs/cgroup/memory.current", str(2 * GIB))
    assert hardware.memory_limits(tmp_path).available_bytes == 0


def test_both_hierarchies_are_read(tmp_path):
    machine = Machine(
        tmp_path, ["4:memory:/one", "0::/two"], [V1_MEMORY, ("cgroup2", "/", "/sys/fs/cgroup/unified", "")]
    )
    machine.write("sys/fs/cgroup/memory/one/memory.limit_in_bytes", str(2 * GIB))
    machine.write("sys/fs/cgroup/unified/two/memory.max", str(GIB))
    assert [limit.version for limit in hardware.memory_limits(tmp_path).limits] == [1, 2]


def test_garbage_in_the_files_is_no_limit(tmp_path):
    machine = Machine(tmp_path, ["nonsense", "0::/"], [V2])
    machine.write("sys/fs/cgroup/cpu.max", "what ever")
    machine.write("sys/fs/cgroup/memory.max", "")
    machine.write("proc/meminfo", "MemAvailable: lots\n")
    assert hardware.usable_cpus(tmp_path, {0, 1}).count == 2
    assert hardware.memory_limits(tmp_path).limits == ()


def test_this_machine_is_described():
    plan, memory = hardware.usable_cpus(), hardware.memory_limits()
    assert 1 <= plan.count <= plan.num_allowed <= plan.num_online
    assert 0 <= memory.available_bytes <= memory.total_bytes
    assert hardware.peak_rss_bytes() > 1 << 20


def test_the_largest_cache_counts(tmp_path):
    machine = Machine(tmp_path)
    assert hardware.last_cache_bytes(tmp_path) == 0
    for number, size in enumerate(("48K", "2048K", "what", "32M", "")):
        machine.write(f"sys/devices/system/cpu/cpu0/cache/index{number}/size", size + "\n")
    assert hardware.last_cache_bytes(tmp_path) == 32 << 20
